"""The learner's process: `python -m ftis_node.learner.worker`, started by `client.LearnerClient`.

All work on the model runs in one thread beside the event loop, so messages and heartbeats continue during a long step.
A canceled request ends between two micro-batches, and a stop of the worker cancels all. The step is then not done and
leaves no trace. The worker saves the newest state before the process ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from ftis_node.errors import MachineError, OutOfMemoryError, WorkerTaskError, first_line
from ftis_node.learner import messages
from ftis_node.learner.distributed.launch import start_ranks
from ftis_node.learner.messages import LearnerBoot
from ftis_node.workers.quick_imports import import_quickly
from ftis_node.workers.wire import Done, Message
from ftis_node.workers.worker import Emitter, Handler, Handlers, run_worker

if TYPE_CHECKING:
    from ftis_node.learner.distributed.ranks import StepCallback
    from ftis_node.learner.learner import Learner

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

IDLE_POLL_INTERVAL_S = 1.0
RETRY_S = 60.0  # after a disk refused a checkpoint


async def work(thread: Executor, piece: Callable[[StepCallback], Result], emit: Emitter) -> Result:
    """Run `piece(between)` in the model's thread. If canceled, make `between` raise, and wait until `piece` ends."""
    stop = threading.Event()

    def between() -> None:
        emit.progress()
        if stop.is_set():
            raise WorkerTaskError("the learner has to stop")

    running = asyncio.get_running_loop().run_in_executor(thread, piece, between)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.gather(running, return_exceptions=True)
        raise


@asynccontextmanager
async def build(boot: LearnerBoot, emit: Emitter) -> AsyncIterator[Handlers]:
    """Build a learner from `boot`, with its handlers. On exit, save its newest step if it is not on disk."""
    async with AsyncExitStack() as stack:
        store = stack.enter_context(start_ranks(boot))
        thread = stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner"))
        learner = await work(thread, lambda between: _open(boot, store, emit), emit)
        saving = asyncio.create_task(_save_while_idle(boot, thread, learner, emit))
        try:
            yield _handlers(boot, thread, learner)
        finally:
            saving.cancel()
            await asyncio.wait([saving])
        try:
            await work(thread, lambda between: learner.save(), emit)
        except MachineError as error:  # no caller is left: the daemon reads the state from the disk
            logger.error("%s", error)
        await work(thread, lambda between: learner.close(), emit)


async def _save_while_idle(boot: LearnerBoot, thread: Executor, learner: Learner, emit: Emitter) -> None:
    """Begin the checkpoint of the newest step when it is due, even without a next step."""
    while boot.settings.checkpoint_every_steps is None:
        await asyncio.sleep(IDLE_POLL_INTERVAL_S)
        try:
            await work(thread, lambda between: learner.checkpoints.save_if_due(), emit)
        except MachineError as error:  # the next step reports it to the daemon if it still fails
            logger.error("%s", error)
            await asyncio.sleep(RETRY_S)


def _open(boot: LearnerBoot, store: str | None, emit: Emitter) -> Learner:
    # In the thread, so that heartbeats continue: torch and transformers take seconds to import.
    import_quickly("ftis_node.learner.learner")
    import torch

    from ftis_node.learner.distributed.ranks import ALONE, RankGroup
    from ftis_node.learner.learner import Learner

    if boot.memory_share is not None:  # beyond it a step is repeated with less memory, and the generator does not fail
        torch.cuda.set_per_process_memory_fraction(boot.memory_share)
    ranks = ALONE if store is None else RankGroup(0, boot.settings.num_ranks, store, boot)
    try:
        learner = Learner(boot, ranks=ranks, on_event=emit)
    except torch.OutOfMemoryError as error:
        lacks = f"{boot.model_name} does not fit into memory for training ({first_line(error)})"
        raise OutOfMemoryError(f"{lacks}: see `ftis-node doctor`") from error
    learner.give_memory_back()
    return learner


def _handlers(boot: LearnerBoot, thread: Executor, learner: Learner) -> Handlers:
    """Return the handler of each request. All but one work in the model's thread, after a step in progress."""

    def in_thread(answer: Callable[[Any, StepCallback, Emitter], Message]) -> Handler:
        async def handle(request: Message, emit: Emitter) -> Message:
            return await work(thread, lambda between: answer(request, between, emit), emit)

        return handle

    def train(request: messages.TrainRequest, between: StepCallback, emit: Emitter) -> Message:
        try:
            return learner.train(request.groups, step=request.step, between=between, on_published=emit)
        finally:
            learner.give_memory_back()

    def give_memory_back(request: messages.GiveMemoryBack, between: StepCallback, emit: Emitter) -> Message:
        learner.give_memory_back(force=True)
        return Done()

    async def check(request: messages.CheckRequest, emit: Emitter) -> Message:
        # Offer first: a step in progress then measures it before its update, and the thread has nothing to do.
        learner.offer_check(request.group)
        if not boot.takes_turns:  # otherwise the next step measures it: between steps the generator has the memory
            await work(thread, lambda between: learner.check(between=between), emit)
        return Done()

    return {
        messages.StateRequest: in_thread(lambda request, between, emit: learner.state()),
        messages.TrainRequest: in_thread(train),
        messages.CheckRequest: check,
        messages.AuditRequest: in_thread(lambda request, between, emit: learner.audit(request.group, between=between)),
        messages.SaveRequest: in_thread(lambda request, between, emit: messages.Saved(step=learner.save())),
        messages.GiveMemoryBack: in_thread(give_memory_back),
        messages.WriteWeights: in_thread(
            lambda request, between, emit: messages.WeightsWritten(learner.write_weights(refused=request.refused))
        ),
    }


if __name__ == "__main__":
    run_worker(build, boot_type=LearnerBoot)
