"""Runs a node in this process: start, loops and shutdown. Builds and runs the loops of each role.

`node/daemon.py` lists the loops.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ftis_node import __version__
from ftis_node.config.disk_room import reporting_full_disk
from ftis_node.config.home_files import start_command
from ftis_node.node.daemon import RoleLoops, run_loops
from ftis_node.node.http_api.auth import observe_token
from ftis_node.node.http_api.exchange_api import ExchangeApi
from ftis_node.node.http_api.local_api import LocalApi
from ftis_node.node.http_api.monitoring_api import MonitoringApi, serve_observed
from ftis_node.node.peers.operator_actions import PeerControl
from ftis_node.node.startup.assemble import running_components
from ftis_node.node.startup.migrations import opened
from ftis_node.node.startup.preflight import check_finished, check_saved
from ftis_node.node.startup.startup_summary import end_lines, finished_lines, read_saved_status
from ftis_node.node.startup.wiring import Wiring
from ftis_node.node.supervision.background import until_signalled
from ftis_node.node.supervision.process_limits import apply_limits
from ftis_node.node.supervision.task_monitor import pause, waiting_for
from ftis_node.node.supervision.watchdog import ServiceManager, Watchdog
from ftis_node.replay.integrity import reporting_damage
from ftis_node.swarm.topology import shard_of
from ftis_node.telemetry.log import log_block, unwatched
from ftis_node.telemetry.otlp import exported_metrics

if TYPE_CHECKING:
    from ftis_node.config.home import Home
    from ftis_node.config.node import NodeSettings
    from ftis_node.node.components import NodeComponents
    from ftis_node.node.startup.run_plan import RunPlan
    from ftis_node.records.group import Group
    from ftis_node.telemetry.log import OnProgress

log = logging.getLogger(__name__)

BUDGET_POLL_S = 0.2


async def run_node(
    node: NodeComponents, *, steps: int | None, observed: MonitoringApi | None = None, watchdog: Watchdog | None = None
) -> None:
    """Run the loops of the node's role until its work is done or until canceled. Raise the error of a failed loop.

    `observed` serves the status from now on. `watchdog` already runs.
    """
    wiring = Wiring(node)
    refused = observed.refused if observed is not None else None
    status = wiring.status_loop(watchdog=watchdog, http_refused=refused)
    await status.refresh()
    work = await work_of_role(wiring, last_step=steps)
    work.loops["peers"] = wiring.peers_loop().run()
    work.loops["disk_space"] = wiring.disk_space_loop().run()
    work.loops["status"] = status.run()
    control = PeerControl(node.peers, wiring.peer_table.rows)
    max_bytes = node.context.manifest.wire.max_envelope_bytes
    exchange_api = None if work.exchange is None else ExchangeApi(work.exchange, max_group_bytes=max_bytes)
    api = LocalApi(
        status,
        wiring.peer_table,
        control=control,
        token_file=node.home.control_token,
        add_exchange=None if exchange_api is None else exchange_api.add_routes,
    )
    await run_loops(node, work=work, status=status, api=api, observed=observed)


async def work_of_role(wiring: Wiring, *, last_step: int | None) -> RoleLoops:
    """Return the loops of the node's role, and the work after which the node ends."""
    match wiring.node.context.settings.role:
        case "learner":
            return _learner_work(wiring, last_step)
        case "generator":
            return await _generator_work(wiring)
        case "exchange":
            return await _exchange_work(wiring)
        case _:
            return _full_work(wiring, last_step)


def _full_work(wiring: Wiring, last_step: int | None) -> RoleLoops:
    loops = wiring.rollout_loops() | {
        "check": wiring.check_loop().run(),
        "audit": wiring.audit_loop().run(),
        "reannounce": wiring.reannounce_loop().run(),
        "shards": wiring.shards_loop().run(),
        "directory": wiring.directory_loop(wiring.backfill).run(),
    }
    return RoleLoops(loops, wiring.train_loop(wiring.step_gate(), last_step=last_step).run())


def _learner_work(wiring: Wiring, last_step: int | None) -> RoleLoops:
    """Return the work of a node that trains on its peers' groups and offers them its weights."""
    offers = wiring.offer_loop()
    wiring.node.gossip.serve_weights(offers.give)
    loops = {
        "pull": wiring.pull.run(),
        "intake": wiring.intake.run(),
        "check": wiring.check_loop().run(),
        "audit": wiring.audit_loop().run(),
        "shards": wiring.shards_loop().run(),
        "directory": wiring.directory_loop(wiring.backfill).run(),
        "offer": offers.run(),
    }
    return RoleLoops(loops, wiring.train_loop(wiring.step_gate(), last_step=last_step, deliver=offers.take).run())


async def _generator_work(wiring: Wiring) -> RoleLoops:
    """Return the work of a node that generates with the weights of the learner that it follows."""
    node, context = wiring.node, wiring.node.context
    follow = wiring.follow_loop()
    await follow.resume()
    own_shard = shard_of(context.peer_id, context.manifest.wire.announcement_shards)
    await node.gossip.read_shards(frozenset({own_shard}))
    scored: asyncio.Queue[Group] = asyncio.Queue(node.slots.capacity)
    loops = {
        "follow": follow.run(),
        "generate": wiring.generate_loop(scored).run(),
        "publish": wiring.publish_loop(scored).run(),
        "intake": wiring.intake.run(),
        "deliver": wiring.deliver_loop().run(),
        "reannounce": wiring.reannounce_loop().run(),
        "directory": wiring.directory_loop(None).run(),
    }
    return RoleLoops(loops, _wait_until_generated(wiring))


async def _exchange_work(wiring: Wiring) -> RoleLoops:
    """Return the work of a node that exchanges the groups of a trainer on this machine. It ends by a signal."""
    publish = wiring.publish_loop(asyncio.Queue(maxsize=1))  # it stays empty: the exchange calls the loop itself
    exchange = wiring.group_exchange(publish)
    await exchange.resume()
    loops = {
        "publish": publish.run(),
        "pull": wiring.pull.run(),
        "intake": wiring.intake.run(),
        "deliver": wiring.deliver_loop().run(),
        "reannounce": wiring.reannounce_loop().run(),
        "shards": wiring.shards_loop().run(),
        "directory": wiring.directory_loop(wiring.backfill).run(),
    }
    return RoleLoops(loops, _until_canceled(), exchange)


async def _until_canceled() -> None:
    with waiting_for("a signal"):
        await asyncio.Event().wait()


async def _wait_until_generated(wiring: Wiring) -> None:
    """Wait until the token budget is used up and every group is published; without a budget, wait forever."""
    while wiring.step_shares.makes_more:
        await pause(BUDGET_POLL_S)
    log.info("all that the budget allows is generated and announced: the node ends")


def run_until_stopped(
    settings: NodeSettings, plan: RunPlan, home: Home, *, steps: int | None, on_progress: OnProgress = unwatched
) -> None:
    """Run a node in this process until its steps are done, or SIGINT or SIGTERM arrives.

    The start calls `on_progress` with each component that it waits for.

    Raise FtisError: HomeInUseError, ConfigError, ModelError, NetworkError, MachineError, WorkerError.
    """
    apply_limits(settings.limits)
    watchdog = Watchdog(settings.observe, manager=ServiceManager.from_environment())
    with reporting_full_disk(home.root), reporting_damage(home.root), opened(home):
        if lines := finished_lines(read_saved_status(home), home, settings=settings):
            check_finished(home, settings)
            log_block(log, lines)
            return
        work = _run(settings, plan, home, steps=steps, on_progress=on_progress, watchdog=watchdog)
        asyncio.run(until_signalled(work, on_fault=watchdog.log_fault))


async def _run(
    settings: NodeSettings,
    plan: RunPlan,
    home: Home,
    *,
    steps: int | None,
    on_progress: OnProgress,
    watchdog: Watchdog,
) -> None:
    observed, parts = MonitoringApi(), None
    try:
        with watchdog.watching():
            async with (
                serve_observed(observed, settings.observe.address, token=observe_token(settings.observe, home)),
                running_components(settings, plan, home, on_progress=on_progress) as parts,
                exported_metrics(
                    settings.observe.otlp_endpoint,
                    observed.newest,
                    version=__version__,
                    instance=parts.context.peer_id,
                ),
            ):
                watchdog.events = parts.context.events
                try:
                    await run_node(parts, steps=steps, observed=observed, watchdog=watchdog)
                finally:
                    watchdog.events = None
    except asyncio.CancelledError:  # by a signal, which is a clean end
        _report_end(observed, home, settings, watchdog, parts)
        raise
    _report_end(observed, home, settings, watchdog, parts)


def _report_end(
    observed: MonitoringApi, home: Home, settings: NodeSettings, watchdog: Watchdog, parts: NodeComponents | None
) -> None:
    """Log the summary of the end. Raise MachineError if a full disk kept the last steps from being saved."""
    if parts is not None and parts.context.settings.learns:
        check_saved(parts.home, parts.source, parts.context.settings, step=parts.context.state.step)
    if watchdog.has_fault:
        return
    if parts is None or observed.status is None or observed.status.first is None:
        log_block(log, [f"stopped before the start was complete; nothing is lost, {start_command(home)} begins again"])
        return
    first, latest = observed.status.first, observed.status.latest
    log_block(log, end_lines(first, latest, home, settings=settings, counters=parts.counters))
