"""The loops of a node and the task group that runs them. The diagram shows the pipeline of a `full` node.

                     +------------------------------ slots freed ------------------------------+
                     v                                                                         |
    task --> [generate] --scored groups--> [publish] --envelope--> [intake] --READY--> [train] +--> weights n+1
                ^                              |                      ^  | (validation)   |            |
                |                              | announcement         |  v                |            |
                |                              v                      |  replay.sqlite    v            |
                |                           gossip --announcement--> [pull]          checkpoints       |
                |                              ^  envelopes, confirmations                             |
                |                              v                                                       |
                |                         [directory] <--> records of peers          [status] --> HTTP |
                +------------------------------- served and verified <---------------------------------+

A group is one prompt with its scored completions. An own group comes from this node, a foreign group from a peer. An
envelope is the packed group (its body) with a signature. A group in the buffer is READY, then TAKEN by a step, then
RELEASED. A slot limits the own groups between generation and training. The home is the data directory.

A `full` node generates and learns. The roles `generator` and `learner` do one of the two, and send weights over the
network (docs/train/roles.md). An `exchange` node does neither: a trainer on its machine sends it groups and takes those
of peers (`exchange/`). A null object (`worker_interfaces.py`) replaces the worker that a role lacks, so the loops do
not depend on the role. The proof of weights is the log-probs of fixed tokens, by which a generator checks them.

    learner     peers --envelopes--> [pull] --> [intake] --READY--> [train] --weights n+1--> [offer] --> generators
    generator   learner --offer, chunks--> [follow] --> engine; task --> [generate] --> [publish] --> [intake], gossip
                                                        slots freed <-- [deliver] <-- confirmations of peers

Each file in `loops/` says what its loops do. One TaskGroup owns all loops, and the first that fails or returns ends the
node with its error. A signal stops the node cleanly: loops, workers, network and scorer stop concurrently. The node
also stops cleanly when its budget is used up, after the last training step or a generator's last group.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine

from ftis_node.errors import FtisError
from ftis_node.node.http_api.exchange_api import ExchangeApi
from ftis_node.node.http_api.routes import LocalApi, MonitoringApi
from ftis_node.node.loops.status import StatusLoop
from ftis_node.node.supervision.watchdog import Watchdog
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.records.names import Role
from ftis_node.telemetry.faults import watched_task
from ftis_node.telemetry.status import EndWord

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
OF_ALL = ("intake", "directory_loop", "upkeep_loop", "disk_cleanup_loop")
GENERATING = ("generate_loop", "publish_loop", "reannounce_loop")
PULLING = ("pull", "shards_loop")
COMPARING = ("mismatch_loop", "audit_loop")
LOOPS_OF_ROLE: dict[Role, tuple[str, ...]] = {
    "full": (*OF_ALL, "pause_loop", *GENERATING, *PULLING, *COMPARING),
    "learner": (*OF_ALL, "pause_loop", *PULLING, *COMPARING, "offer_loop"),
    "generator": (*OF_ALL, "pause_loop", *GENERATING, "follow_loop", "deliver_loop"),
    "exchange": (*OF_ALL, "publish_loop", "reannounce_loop", *PULLING, "deliver_loop"),
}
"""The attributes of `Wiring` that a role runs beside the status loop and the train loop."""


async def run_node(
    node: NodeComponents, *, steps: int | None, observed: MonitoringApi | None = None, watchdog: Watchdog | None = None
) -> None:
    """Run the loops of the node's role until its work is done or until canceled. Raise the error of a failed loop.

    `observed` serves the status from now on. `watchdog` already runs.
    """
    wiring, observed = Wiring(node), observed or MonitoringApi()
    status = wiring.status_loop(watchdog=watchdog, http_refused=observed.refused)
    await status.refresh()
    await _prepare_role(wiring)
    endless = loops_of_role(wiring) | {"status": status.run}
    loops = {name: _without_end(name, loop()) for name, loop in endless.items()} | {
        "generation worker": node.generation.run(),
        "learner worker": node.learner.run(),
        "network": _ended_by(node.gossip.close),
        "scorer": _ended_by(node.scorer.close),
        "scorer of new peers' groups": _ended_by(node.new_peers_scorer.close),
        "stop": _ended_by(status.begin_stop),
        "writes that wait for disk space": _ended_by(node.store.space.end),
    }
    observed.status = status
    async with _local_api(wiring, status).serve(port=0) as url:
        node.home.publish_address(url)
        log.info("node %s is up, its figures are at %s", node.context.about.name, url)
        await status.refresh()  # before the first step: the summary at the end compares with this status
        end = EndWord.FAILED
        showing = watched_task(status.show_stop(), name="status of the stop")
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(loop, name=name) for name, loop in loops.items()]
                await tasks.create_task(_until_done(wiring, last_step=steps), name="work")
                await status.begin_stop("peers that fetch the last groups, and the checkpoint of the last step")
                for task in running:
                    if task.get_name() == "pause":
                        task.cancel()
                lingering = tasks.create_task(serve_last_groups(wiring), name="peers that fetch the last groups")
                saving = tasks.create_task(_save(node), name="the checkpoint of the last step")
                await asyncio.wait([saving, lingering])
                for task in running:
                    task.cancel()
            end = EndWord.FINISHED
        except asyncio.CancelledError:
            end = EndWord.STOPPED
            raise
        finally:
            await node.tracking.close()  # after the loops, which queue metrics until they end
            showing.cancel()
            await asyncio.wait([showing])
            await status.refresh(end=end)
            await status.save_if_space()


def _local_api(wiring: Wiring, status: StatusLoop) -> LocalApi:
    node = wiring.node
    add_exchange = None
    if node.context.settings.role == "exchange":
        max_bytes = node.context.manifest.wire.max_envelope_bytes
        add_exchange = ExchangeApi(wiring.exchange, max_group_bytes=max_bytes).add_routes
    return LocalApi(
        status,
        wiring.swarm,
        pauses=None if add_exchange else wiring.pause_loop,
        token_file=node.home.control_token,
        add_exchange=add_exchange,
    )


async def _prepare_role(wiring: Wiring) -> None:
    node = wiring.node
    match node.context.settings.role:
        case "learner":
            node.gossip.serve_weights(wiring.offer_loop.give)
        case "generator":
            if not node.context.pause.is_paused:  # otherwise the engine loads the weights after the pause
                await wiring.follow_loop.resume()
            await node.gossip.read_shards(frozenset({node.context.shard}))
        case "exchange":
            await wiring.exchange.resume()


def loops_of_role(wiring: Wiring) -> dict[str, Callable[[], Coroutine[None, None, None]]]:
    """Return the loops of the node's role by name, without the status loop and the train loop, which ends."""
    attributes = LOOPS_OF_ROLE[wiring.context.settings.role]
    return {name.removesuffix("_loop"): getattr(wiring, name).run for name in attributes}


async def _until_done(wiring: Wiring, *, last_step: int | None) -> None:
    """Train, or wait, until the node has no more work; the node then ends. An exchange node ends by a signal."""
    match wiring.node.context.settings.role:
        case "generator":
            while wiring.step_shares.makes_more:  # noqa: ASYNC110 - a slot, the buffer or the budget changes it
                await asyncio.sleep(POLL_INTERVAL_S)
            log.info("all that the budget allows is generated and announced: the node ends")
        case "exchange":
            await asyncio.Event().wait()
        case role:
            deliver = wiring.offer_loop.take if role == "learner" else None
            await wiring.train_loop(wiring.step_gate(), last_step=last_step, deliver=deliver).run()


async def _save(node: NodeComponents) -> None:
    """Save a checkpoint of the last step now: it can take longer than the time limit for stopping a worker."""
    if node.context.pause.is_paused:  # a learner that ends saves
        return
    try:
        step = await node.learner.save()
        if node.context.settings.learns:
            log.debug("step %d is saved", step)
            if step < node.context.state.step:  # it died and went back
                log.error("the last step is not saved: only step %d of %d is", step, node.context.state.step)
    except FtisError as error:
        log.error("the last step is not saved: %s", error)


async def _without_end(name: str, loop: Coroutine[None, None, None]) -> None:
    """Raise FtisError if a loop returns: the node would continue without it."""
    await loop
    raise FtisError(f"internal fault: the {name} loop ended by itself; run with --debug and report it")


async def _ended_by(close: Callable[[], Awaitable[None]]) -> None:
    """Close a component when the loops are canceled, concurrently with the workers."""
    try:
        await asyncio.Event().wait()
    finally:
        await close()


async def serve_last_groups(wiring: Wiring) -> None:
    """Run for up to `swarm.shutdown_serve_s` after the last step, until no own group waits for a confirmation."""
    node, confirmations = wiring.node, wiring.peers.confirmations
    deadline = time.monotonic() + node.context.settings.swarm.shutdown_serve_s
    while time.monotonic() < deadline and await node.gossip.members():
        if not wiring.publish_loop.num_unannounced and not len(confirmations.pending):
            return
        await asyncio.sleep(POLL_INTERVAL_S)
