"""Starts the components of a node, the cheapest failures first, and stops them together.

    inputs checked (prepare.py) -> components built (assemble.py) -> workers and network started concurrently

`prepare.py` finds a user's mistakes, before a worker is ready or the buffer is opened.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from ftis_node.config.home import Home
from ftis_node.config.node import NodeSettings
from ftis_node.gossip.p2pd.process import check_free
from ftis_node.models import parameter_count
from ftis_node.node.startup.assemble import assemble
from ftis_node.node.startup.factories import NodeFactory, ProcessNodeFactory
from ftis_node.node.startup.prepare import prepare
from ftis_node.node.startup.previous_run import mark_end, mark_start
from ftis_node.node.startup.run_plan import RunPlan
from ftis_node.node.startup.summaries import start_lines
from ftis_node.node.supervision.shutdown import first_of_ours
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.telemetry.events import EVENT_SCHEMA, EventLog
from ftis_node.telemetry.log import OnProgress, log_block, unwatched
from ftis_node.telemetry.status import EndWord
from ftis_node.telemetry.terminal_text import size
from ftis_node.workers.durable import CHECKPOINT_PREFIX, checkpoint_step, remove_leftovers
from ftis_node.workers.preload import Preload

log = logging.getLogger(__name__)


@asynccontextmanager
async def running_components(
    settings: NodeSettings,
    plan: RunPlan,
    home: Home,
    factory: NodeFactory | None = None,
    *,
    on_progress: OnProgress = unwatched,
) -> AsyncIterator[NodeComponents]:
    """Yield the running components of a node. Stop and save all of them when the block ends, also on an error.

    If `factory` is None, the workers are separate processes and the network is libp2p.

    Raise ModelError, TaskError, ConfigError, UsageError, NetworkError, MachineError, WorkerError.
    """
    preload: Preload | None = None
    async with AsyncExitStack() as stack:
        if factory is None:
            factory = ProcessNodeFactory(settings, home)  # raises for a malformed address before anything starts
            check_free(factory.listen_addresses)
            if (preload := factory.preload) is not None:
                stack.callback(preload.close)
                preload.begin()
        inputs = await prepare(settings, plan, home, factory, on_progress)
        begun_at = checkpoint_step(home.checkpoints) if settings.learns else 0
        log_block(log, start_lines(inputs, num_parameters=parameter_count(inputs.source), step=begun_at))
        mark_start(home)
        parts = assemble(stack, inputs, factory)
        parts.gossip.guard.on_fault = parts.peers.charge_fault
        wiring = Wiring(parts)
        wiring.serve_peers()
        try:
            if settings.generates or settings.learns:
                await wiring.pause_loop.check()
            await _start(parts, on_progress)
            if preload is not None:
                preload.close()
            yield parts
        except asyncio.CancelledError:
            mark_end(home, EndWord.STOPPED)
            raise
        except Exception as error:
            mark_end(home, EndWord.FAILED)
            first = first_of_ours(error)
            parts.context.events.write("failed", where="the node", error=f"{type(first).__name__}: {first}")
            raise
        finally:
            await _stop(parts)


@dataclass(eq=False, repr=False)
class StartProgress:
    """Observer of a start. It shows a line such as `generator: compiling; loading m (3.2 MB) into learner; connecting`.

    `parts` are the components that the node waits for. Restarts of the engine after the start give events only.
    """

    parts: list[str]
    model: str
    events: EventLog
    show: OnProgress
    _phase: str = field(default="", init=False)
    _began_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._show_line()

    def __str__(self) -> str:
        workers = [name for name in self.parts if name != "network"]
        phase = f"generator: {self._phase}" if self._phase and "generator" in workers else ""
        loading = " and ".join(name for name in workers if not (phase and name == "generator"))
        lines = (phase, loading and f"loading {self.model} into {loading}", "connecting" * ("network" in self.parts))
        return "; ".join(filter(None, lines))

    def end(self, part: str) -> None:
        self.parts.remove(part)
        self._show_line()

    def begin_phase(self, phase: str) -> None:
        """Note that a phase of the engine's start begins, which ends the one before; "" after the last one."""
        now_s = time.monotonic()
        if self._phase:
            self.events.write("engine_start", phase=self._phase, duration_s=round(now_s - self._began_s, 1))
        self._phase, self._began_s = phase, now_s
        if "generator" in self.parts:
            self._show_line()

    def _show_line(self) -> None:
        self.show(None, str(self))


async def _start(parts: NodeComponents, on_progress: OnProgress) -> None:
    context, settings = parts.context, parts.context.settings
    done = context.state.step
    model = f"{parts.source.name} ({size(sum(path.stat().st_size for path in parts.source.weights_files))})"
    has_workers = (settings.generates or settings.learns) and not context.pause.is_paused
    names = ["generator", "learner", "network"] if has_workers else ["network"]
    progress = StartProgress([*names], model, context.events, on_progress)
    starts: dict[str, Callable[[], Awaitable[object]]] = {
        "generator": partial(parts.generation.start, progress.begin_phase),
        "learner": parts.learner.start,
        "network": parts.gossip.start,
    }

    has_learner = asyncio.Event()

    async def start(name: str) -> None:
        if name == "generator" and parts.arrangement.takes_turns:
            await has_learner.wait()  # a learner that loads or measures its kernels may need all of the memory
        await starts[name]()
        progress.end(name)
        if name == "learner":
            has_learner.set()

    context.events.write(
        "start", schema=EVENT_SCHEMA, run=context.manifest.run_id, peer=context.peer_id, model=parts.source.name
    )
    log.debug("%s; what the workers print is in %s", progress, parts.home.logs)
    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(start(name), name=f"start-{name}")
        tasks.create_task(parts.scorer.check(), name="check-graders")
    if context.pause.is_paused:
        return
    state = parts.learner.state
    assert state is not None, "a started learner has a state"
    if settings.learns:
        if state.step < done:
            log.warning("step %d is done, but the newest readable checkpoint is of step %d", done, state.step)
            context.events.write("checkpoint_fallback", step=state.step, done=done)
    log.debug("%s: %s parameters, at step %d", parts.source.name, f"{state.parameters:,}", state.step)
    if settings.role == "learner":
        log.info("generators take this learner's weights by --role generator --follow %s", context.peer_id)


async def _stop(parts: NodeComponents) -> None:
    """Stop all components concurrently. Each has a time limit: ten seconds, and more for a learner that saves."""
    results = await asyncio.gather(
        parts.generation.stop(),
        parts.learner.stop(),
        parts.gossip.close(),
        parts.scorer.close(),
        parts.new_peers_scorer.close(),
        parts.tracking.close(),
        return_exceptions=True,
    )
    for result in results:
        if isinstance(result, BaseException):
            log.error("while stopping: %s", result)
    with suppress(OSError):  # a killed learner leaves the folder; if removal fails, the next start removes it
        remove_leftovers(parts.home.checkpoints, CHECKPOINT_PREFIX)
    tracked = {"tracked": parts.tracking.counts()} if parts.tracking else {}
    parts.context.events.write("stop", step=parts.context.state.step, **tracked)
