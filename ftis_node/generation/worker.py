"""The generation worker: `python -m ftis_node.generation.worker`, started by the client's supervisor.

It holds one engine, and translates between messages and the engine's requests. Processes that the engine spawns end
with this one, however it ends and however deep they are nested. `multiprocessing` imports the main module first in each
of them, and this file then ties the process to its parent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from ftis_node.errors import ModelError, WorkerTaskError
from ftis_node.generation import messages
from ftis_node.generation.engines import choose_engine
from ftis_node.generation.engines.base import Engine, GenerateRequest
from ftis_node.generation.engines.vllm_log import WorkerLog
from ftis_node.models import resolve_model
from ftis_node.telemetry.faults import watched_task
from ftis_node.workers.liveness import die_with_owner
from ftis_node.workers.weight_store import file_checksums, find_difference
from ftis_node.workers.wire import Done
from ftis_node.workers.worker import Emitter, Handlers, run_worker

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
POLL_LOG_S = 0.5


class Service:
    """The request handlers of the worker, backed by one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def load_weights(self, request: messages.LoadWeights, emit: Emitter) -> messages.WeightsLoaded:
        """Load new weights and return the version that the engine reports.

        The engine is awake afterwards, also on ModelError, unless it has discarded the old weights. On SharingError it
        is unchanged.
        """
        began_s, path = time.monotonic(), Path(request.path)
        try:
            if request.shared is not None:
                held = await self._engine.load_shared(request.shared, request.version)
            else:
                held = await self._engine.load_weights(path, request.version, is_locked=request.is_locked)
        except ModelError:
            with suppress(WorkerTaskError):
                await self._engine.wake()
            raise
        load_s = time.monotonic() - began_s
        published = request.checksums or await asyncio.to_thread(file_checksums, path)
        difference = find_difference(published, held)
        return messages.WeightsLoaded(version=self._engine.policy_version, load_s=load_s, difference=difference)

    async def probe(self, request: messages.Probe, emit: Emitter) -> messages.Probed:
        return messages.Probed(logprobs=tuple(await self._engine.probe(request.token_ids)))

    async def sleep(self, request: messages.Sleep, emit: Emitter) -> Done:
        await self._engine.sleep(discard=request.discard)
        return Done()

    async def wake(self, request: messages.Wake, emit: Emitter) -> Done:
        await self._engine.wake()
        return Done()

    async def describe(self, request: messages.Describe, emit: Emitter) -> messages.Description:
        return messages.Description(engine=self._engine.name)

    def handlers(self) -> Handlers:
        return {
            GenerateRequest: lambda request, emit: self._engine.generate(request),
            messages.LoadWeights: self.load_weights,
            messages.ShareBase: lambda request, emit: self._engine.share_base(),
            messages.Probe: self.probe,
            messages.Sleep: self.sleep,
            messages.Wake: self.wake,
            messages.Describe: self.describe,
        }


async def report_tokens(engine: Engine, emit: Emitter, *, every_s: float = REPORT_EVERY_S) -> None:
    """Send the number of sampled tokens to the daemon at once and whenever it has grown, until canceled.

    A sleeping engine samples none, and its waiting requests must not count as a hang.
    """
    num_reported = engine.tokens_made
    emit(messages.TokensMade(total=num_reported))
    while True:
        await asyncio.sleep(every_s)
        if engine.tokens_made != num_reported:
            num_reported = engine.tokens_made
            emit(messages.TokensMade(total=num_reported))
        elif engine.is_asleep:
            emit.progress()


async def report_break(engine: Engine, emit: Emitter) -> None:
    """Send an event when the engine has failed for good: the daemon ends this process and starts another."""
    reason = await engine.wait_broken()
    logger.error("the engine %s", reason)
    emit(messages.EngineBroken(reason=reason))


@asynccontextmanager
async def phases_reported(emit: Emitter, *, every_s: float = POLL_LOG_S) -> AsyncIterator[None]:
    """Send an event for each phase of an engine's start, as vLLM logs them, and one at the end."""
    log = WorkerLog()

    def report() -> None:
        for phase in log.new_phases():
            emit(messages.StartPhase(phase))

    async def poll() -> None:
        while True:
            report()
            await asyncio.sleep(every_s)

    poller = watched_task(poll(), name="report-phases")
    try:
        yield
    finally:
        poller.cancel()
        report()
        emit(messages.StartPhase(""))


@asynccontextmanager
async def build(boot: messages.GenerationBoot, emit: Emitter) -> AsyncIterator[Handlers]:
    open_engine = choose_engine(boot.engine)
    async with phases_reported(emit):
        engine = await open_engine(resolve_model(boot.model), boot.settings, emit.progress)
    reporters = [
        watched_task(report_tokens(engine, emit), name="report-tokens"),
        watched_task(report_break(engine, emit), name="report-break"),
    ]
    try:
        yield Service(engine).handlers()
    finally:
        for reporter in reporters:
            reporter.cancel()
        await engine.close()


if __name__ == "__main__":
    run_worker(build, boot_type=messages.GenerationBoot)
elif __name__ == "__mp_main__":  # the module's name in processes that vLLM spawns from this one
    die_with_owner(os.getppid())
