"""Scores from a process of its own: text from peers never keeps the daemon busy, fills its memory or ends it.

    score(item, texts) --> one text at a time --> pool of spawned processes --> (reward, status)
                                                  | over its time: killed, a new one is started
                                                  | dies (memory, CPU limit): a new one is started

Every text comes out, as SCORED or as UNSCORED with reward 0. Tasks whose scoring is harmless are scored right here.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Self

from pebble import ProcessExpired, ProcessPool

from ftis_node.errors import TaskError, WorkerDiedError
from ftis_node.records.group import CompletionStatus
from ftis_node.tasks.mixed import leaves
from ftis_node.tasks.scoring_worker import checked_score, score_in_worker, start_worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.tasks.base import Task, TaskItem

log = logging.getLogger(__name__)

NUM_TRIES = 2  # a pool that broke while it was idle is no fault of the text at hand


Score = tuple[float, CompletionStatus]
UNSCORED: Score = (0.0, CompletionStatus.UNSCORED)


@dataclass(frozen=True, slots=True)
class ScoringLimits:
    """What scoring may use up."""

    time_limit_s: float = 5.0  # one text
    group_limit_s: float = 20.0  # the texts of one call together, not counting the wait for a free process
    start_limit_s: float = 60.0  # a process that starts and loads its tasks
    memory_limit_bytes: int = 4 << 30  # the address space of one process
    num_workers: int = 1


class IsolatedScorer:
    """Scores completions of the problems of `tasks`. Started by `start` or the first score, ended by `close`."""

    def __init__(self, *tasks: Task, limits: ScoringLimits | None = None) -> None:
        """Raises TaskError for a task that wants isolation and cannot travel to another process."""
        self._limits = limits or ScoringLimits()
        self._tasks = {(leaf.name, leaf.split): leaf for task in tasks for leaf in leaves(task)}
        self._isolated = tuple(task for task in self._tasks.values() if task.isolate_scoring)
        for task in self._isolated:
            _check_can_travel(task)
        self._free_workers = asyncio.Semaphore(self._limits.num_workers)
        self._pool_change = asyncio.Lock()
        self._pool: Any = None
        self._in_flight: set[asyncio.Future[float]] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Starts the processes, if any task needs them; they get ready while the caller goes on.

        Raises WorkerDiedError where the system gives us no process.
        """
        if self._isolated:
            try:
                await self._running_pool()
            except BrokenProcessPool as error:
                raise WorkerDiedError(f"the scoring process cannot be started: {error}") from error

    async def score(self, item: TaskItem, texts: Sequence[str]) -> list[Score]:
        """The score of each text, in order.

        Raises WorkerDiedError where no scoring process can be kept running.
        """
        task = self._tasks[item.ref.task, item.ref.split]
        if not task.isolate_scoring:
            return [_score_here(task, item, text) for text in texts]
        scores: list[Score] = []
        spent_s = 0.0
        for text in texts:
            if spent_s >= self._limits.group_limit_s:
                log.warning("%s: %d texts of one group took too long to score", item.ref, len(texts) - len(scores))
                return scores + [UNSCORED] * (len(texts) - len(scores))
            async with self._free_workers:
                began = time.monotonic()
                scores.append(await self._score_isolated(item, text))
                spent_s += time.monotonic() - began
        return scores

    async def close(self) -> None:
        """Ends the processes, busy or not, within two seconds. Texts that were waiting come out UNSCORED."""
        self._closed = True
        for future in tuple(self._in_flight):
            future.cancel()
        await self._drop_pool()

    async def _score_isolated(self, item: TaskItem, text: str) -> Score:
        for _ in range(NUM_TRIES):
            if self._closed:
                return UNSCORED
            try:
                return await self._ask_worker(item, text), CompletionStatus.SCORED
            except TimeoutError:
                log.warning("%s: a text took more than %g s to score", item.ref, self._limits.time_limit_s)
                return UNSCORED
            except ProcessExpired as error:
                log.warning("%s: the scoring process died of a text, exit code %s", item.ref, error.exitcode)
                return UNSCORED
            except BrokenProcessPool as error:
                log.debug("%s: the pool broke under a text: %s", item.ref, error)
            except WorkerDiedError:
                await self._drop_pool()
                raise
            except Exception as error:
                log.warning("%s: scoring a text failed: %r", item.ref, error)
                return UNSCORED
        if self._closed:
            return UNSCORED
        raise WorkerDiedError("the scoring process does not stay alive: is there enough memory?")

    async def _ask_worker(self, item: TaskItem, text: str) -> float:
        """One text's reward, or what became of it as an exception: BrokenProcessPool where that is not its fault."""
        limits = self._limits
        pool = await self._running_pool()
        try:
            scheduled = pool.schedule(
                score_in_worker, args=(item, text, limits.time_limit_s), timeout=limits.time_limit_s
            )
        except RuntimeError as error:  # it broke, or was closed, since we looked
            raise BrokenProcessPool(str(error)) from error
        future: asyncio.Future[float] = asyncio.wrap_future(scheduled)
        self._in_flight.add(future)
        try:
            done, _ = await asyncio.wait({future}, timeout=limits.start_limit_s + limits.time_limit_s)
            if not done:
                raise WorkerDiedError(f"the scoring process was not ready within {limits.start_limit_s:g} s")
            if future.cancelled():
                raise BrokenProcessPool("closed while a text was waiting")
            return future.result()
        finally:
            self._in_flight.discard(future)
            future.cancel()

    async def _running_pool(self) -> Any:
        """The pool with its processes started; a new one where the last one broke, which idle processes can do too.

        Raises BrokenProcessPool where it cannot be started, or not any more.
        """
        async with self._pool_change:
            if self._pool is not None and not self._pool.active:
                log.warning("the scoring process died, a new one is started")
                await self._stop_pool()
            if self._closed:
                raise BrokenProcessPool("the scorer is closed")
            if self._pool is None:
                self._pool = ProcessPool(
                    max_workers=self._limits.num_workers,
                    initializer=start_worker,
                    initargs=(self._isolated, os.getpid(), self._limits.memory_limit_bytes),
                    context=multiprocessing.get_context("spawn"),
                )
                await asyncio.to_thread(lambda pool: pool.active, self._pool)  # starts it
            return self._pool

    async def _drop_pool(self) -> None:
        async with self._pool_change:
            await self._stop_pool()

    async def _stop_pool(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            await asyncio.to_thread(pool.join)


def _score_here(task: Task, item: TaskItem, text: str) -> Score:
    try:
        return checked_score(task, item, text), CompletionStatus.SCORED
    except Exception as error:  # a plug-in that breaks its promise must not end the daemon
        log.warning("%s: scoring a text failed: %r", item.ref, error)
        return UNSCORED


def _check_can_travel(task: Task) -> None:
    try:
        ForkingPickler.dumps(task)
    except Exception as error:  # pickling runs the task's own code
        raise TaskError(f"the task {task.name!r} wants isolated scoring but cannot be pickled: {error}") from error
