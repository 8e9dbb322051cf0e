"""Runs a node in this process from its start to its shutdown. `node/daemon.py` has its loops."""

from __future__ import annotations

import asyncio
import logging

from ftis_node.config.home import Home
from ftis_node.config.home_files import start_command
from ftis_node.config.node import NodeSettings
from ftis_node.errors import MachineError
from ftis_node.files import free_bytes, reporting_full_disk
from ftis_node.models.source import ModelSource
from ftis_node.node.daemon import run_node
from ftis_node.node.http_api.access import observe_token
from ftis_node.node.http_api.routes import MonitoringApi, serve_observed
from ftis_node.node.startup.home_opening import opened_home
from ftis_node.node.startup.prepare import check_finished
from ftis_node.node.startup.previous_run import read_saved_status
from ftis_node.node.startup.run_plan import RunPlan
from ftis_node.node.startup.running_components import running_components
from ftis_node.node.startup.summaries import end_lines, finished_lines
from ftis_node.node.storage.home_size import checkpoint_bytes
from ftis_node.node.supervision.process_limits import apply_limits
from ftis_node.node.supervision.shutdown import until_signalled
from ftis_node.node.supervision.watchdog import Watchdog, service_manager
from ftis_node.node.wiring import NodeComponents
from ftis_node.replay.integrity import reporting_damage
from ftis_node.telemetry.log import OnProgress, log_block, unwatched
from ftis_node.workers.durable import checkpoint_step

log = logging.getLogger(__name__)


def run_until_stopped(
    settings: NodeSettings, plan: RunPlan, home: Home, *, on_progress: OnProgress = unwatched
) -> None:
    """Run a node in this process until its budget is used up, or SIGINT, SIGTERM or SIGHUP arrives.

    The start calls `on_progress` with each component that it waits for.

    Raise FtisError: UsageError, ConfigError, ModelError, NetworkError, MachineError, WorkerError.
    """
    apply_limits(settings.limits)
    watchdog = Watchdog(manager=service_manager())
    with reporting_full_disk(home.root), reporting_damage(home.root), opened_home(home):
        if lines := finished_lines(read_saved_status(home), home, settings=settings):
            check_finished(home, settings)
            log_block(log, lines)
            return
        work = _run(settings, plan, home, on_progress=on_progress, watchdog=watchdog)
        asyncio.run(until_signalled(work, on_fault=watchdog.log_fault))


async def _run(
    settings: NodeSettings, plan: RunPlan, home: Home, *, on_progress: OnProgress, watchdog: Watchdog
) -> None:
    observed, parts, steps = MonitoringApi(), None, settings.budget.learn_steps
    try:
        with watchdog.watching():
            async with (
                serve_observed(observed, settings.observe.address, token=observe_token(settings.observe, home)),
                running_components(settings, plan, home, on_progress=on_progress) as parts,
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
    log_block(log, end_lines(first, latest, home, settings=settings, counters=parts.context.counters))


def check_saved(home: Home, source: ModelSource, settings: NodeSettings, *, step: int) -> None:
    """Raise MachineError at a node's end if a full disk kept its last steps from being saved."""
    saved = checkpoint_step(home.checkpoints)
    if saved < step and free_bytes(home.checkpoints) < checkpoint_bytes(source, settings):
        raise MachineError(
            f"the disk is full: {home.checkpoints} has no checkpoint after step {saved} of {step}; "
            f"free disk space and start again: the node resumes after step {saved}"
        )
