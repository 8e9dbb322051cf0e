"""Scores from a separate process, so that texts from peers never block, fill or end the daemon.

    score(item, texts) --> one text at a time --> a spawned process --> (reward, status)
                                                  | over its time: killed, a new one is started
                                                  | dies (memory, CPU limit): a new one is started

The limit is CPU time, which does not depend on other load. If only the wall-time limit is exceeded, this machine is at
fault and no peer is blamed. Tasks with harmless scoring run in the daemon's process.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from operator import methodcaller
from typing import Any, Self, cast

from pebble import ProcessExpired, ProcessPool

from ftis_node.errors import MachineError, TaskError, WorkerDiedError
from ftis_node.records.group import CompletionStatus, PromptRef
from ftis_node.tasks.base import Task, TaskItem, leaves
from ftis_node.tasks.episodes.episode import Play, is_episode
from ftis_node.tasks.scoring_worker import (
    ScoringCost,
    ScoringReply,
    checked_score,
    grader_fault,
    start_worker,
    work_in_worker,
)

log = logging.getLogger(__name__)

FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM})  # a text cannot cause these exit codes
GROUP_LIMIT_S = 20.0
OWN_SHARE = 0.5  # of the limits, for own groups: a peer's machine may need twice the processor time
NUM_TRIES = 2  # the current text is not to blame for a pool that broke while idle


Score = tuple[float, CompletionStatus]
UNSCORED: Score = (0.0, CompletionStatus.UNSCORED)


@dataclass(frozen=True, slots=True)
class ScoringLimits:
    time_limit_s: float = 5.0  # CPU time for one text
    wall_limit_s: float = 20.0  # wall time for one text, enough if it gets a quarter of a core
    group_limit_s: float = GROUP_LIMIT_S  # CPU time for all texts of one call
    start_limit_s: float = 60.0  # wall time for a process to start and load its tasks
    memory_limit_bytes: int = 1 << 30  # address space of one process; honest answers need at most a quarter


class IsolatedScorer:
    """Scorer for completions of the problems of `tasks`. The first call starts its process, `close` ends it."""

    def __init__(self, *tasks: Task, scored_only: Sequence[Task] = (), limits: ScoringLimits | None = None) -> None:
        """Accept `tasks` to score and resolve, and `scored_only` tasks, such as those of evaluations, only to score.

        Raises TaskError for a task that needs isolation but cannot be pickled.
        """
        self._limits = limits or ScoringLimits()
        self._resolved = {(leaf.name, leaf.split): leaf for task in tasks for leaf in leaves(task)}
        also = {(leaf.name, leaf.split): leaf for task in scored_only for leaf in leaves(task)}
        self._tasks = also | self._resolved
        self._isolated = tuple(task for task in self._tasks.values() if task.isolate_scoring)
        for task in self._isolated:
            _check_can_travel(task)
        self._worker = asyncio.Lock()
        self._pool_change = asyncio.Lock()
        self._pool: Any = None
        self._in_flight: set[asyncio.Future[Any]] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        """Check the graders, which starts the process. Raises MachineError, WorkerDiedError."""
        try:
            await self.check()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def check(self) -> None:
        """Let the tasks check their graders in the scoring process, because an honest peer would be blamed for a broken
        one. Raises MachineError, and WorkerDiedError if no scoring process stays up.
        """
        for task in self._isolated:
            cost = ScoringCost()
            try:
                async with self._worker:
                    fault = await self._ask_worker(grader_fault, task.name, task.split, cost=cost)
            except (TimeoutError, ProcessExpired) as error:
                fault = f"{task.name}: its grader was not checked: {self._note_end(error, cost)}"
                if not cost.num_stopped:
                    log.warning("%s", fault)
                    continue
            if fault:
                raise MachineError(str(fault))

    async def resolve(self, ref: PromptRef, *, cost: ScoringCost | None = None) -> TaskItem:
        """Return the problem that `ref` names, made in the scoring process if the task declares this slow.

        Raises KeyError for an unknown problem, and TimeoutError if making it exceeds the time limit of a text. Raises
        WorkerDiedError if no scoring process stays up. Exceptions of the task pass through.
        """
        cost = cost or ScoringCost()
        task = self._resolved.get((ref.task, ref.split))
        if task is None:
            raise KeyError(str(ref))
        if not getattr(task, "isolate_resolving", False):
            return task.resolve(ref)
        async with self._worker:
            try:
                resolve = methodcaller("resolve", ref)
                return cast("TaskItem", await self._ask_worker(resolve, ref.task, ref.split, cost=cost))
            except (TimeoutError, ProcessExpired) as error:
                self._note_end(error, cost)
                raise TimeoutError(f"{ref}: its problem took too long to make") from None

    async def score(self, item: TaskItem, texts: Sequence[str], *, cost: ScoringCost | None = None) -> list[Score]:
        """Return the score of each text, in order.

        The call adds to `cost`. If `cost` is given, the first text without a score ends the call, because the group is
        then unusable. Raises WorkerDiedError if no scoring process stays up.
        """
        is_whole_group = cost is not None
        cost = cost or ScoringCost()
        before_s = cost.seconds
        task = self._tasks[item.ref.task, item.ref.split]
        if not task.isolate_scoring:
            return [_score_here(task, item, text) for text in texts]
        scores: list[Score] = []
        for text in texts:
            if is_whole_group and cost.num_unfinished:
                break
            if cost.seconds - before_s >= self._limits.group_limit_s * cost.share:
                log.warning("%s: %d texts of one group took too long to score", item.ref, len(texts) - len(scores))
                cost.num_stopped += len(texts) - len(scores)
                break
            async with self._worker:
                reward = await self._work_on(partial(checked_score, item=item, text=text), item, cost=cost)
            scores.append(UNSCORED if reward is None else (reward, CompletionStatus.SCORED))
        return scores + [UNSCORED] * (len(texts) - len(scores))

    def is_episode(self, item: TaskItem) -> bool:
        return is_episode(self._tasks[item.ref.task, item.ref.split])

    async def play(self, item: TaskItem, texts: Sequence[str], *, cost: ScoringCost) -> Play | None:
        """Return the replay of the texts of an episode; None if it failed or took too long. Adds to `cost`.

        Raises WorkerDiedError if no scoring process stays up.
        """
        task, before = self._tasks[item.ref.task, item.ref.split], cost.num_unfinished
        if task.isolate_scoring:
            async with self._worker:
                play = methodcaller("play", item, tuple(texts))
                played = cast("Play | None", await self._work_on(play, item, cost=cost))
        else:
            try:
                played = task.play(item, texts)  # type: ignore[attr-defined]
            except Exception as error:  # a faulty episode must not end the daemon
                log.warning("%s: playing an episode failed: %r", item.ref, error)
                played = None
        if played is None and cost.num_unfinished == before:  # the episode raised
            cost.num_lost += 1
        return played

    async def close(self) -> None:
        """End the processes, busy or not, within two seconds. Waiting texts become UNSCORED."""
        self._closed = True
        for future in tuple(self._in_flight):
            future.cancel()
        await self._drop_pool()

    async def _work_on(self, work: Callable[[Task], object], item: TaskItem, *, cost: ScoringCost) -> Any:
        """Return what `work` in the worker gives for the task of a problem; None if it fails."""
        try:
            return await self._ask_worker(work, item.ref.task, item.ref.split, cost=cost)
        except (TimeoutError, ProcessExpired) as error:
            log.warning("%s: %s", item.ref, self._note_end(error, cost))
        except WorkerDiedError:
            if not self._closed:
                await self._drop_pool()
                raise
            cost.num_lost += 1
        except Exception as error:
            log.warning("%s: scoring a text failed: %r", item.ref, error)
        return None

    def _note_end(self, error: TimeoutError | ProcessExpired, cost: ScoringCost) -> str:
        """Add a call that the worker did not finish to `cost`, and return a description.

        The exit code decides whether the text or this machine is the cause.
        """
        cost.seconds += self._limits.time_limit_s
        if isinstance(error, TimeoutError):
            cost.num_lost += 1
            return f"a text was not scored within {self._limits.wall_limit_s:g} s: is this machine busy?"
        if error.exitcode in FROM_OUTSIDE:
            cost.num_lost += 1
            return f"something ended the scoring process, exit code {error.exitcode}"
        cost.num_stopped += 1
        return f"the scoring process died of a text, or ran out of processor time, exit code {error.exitcode}"

    async def _ask_worker(self, work: Callable[[Task], object], name: str, split: str, *, cost: ScoringCost) -> object:
        """Do the work with this task in the worker; return its result or raise its exception.

        Raises WorkerDiedError if the scorer is closed or no process stays up.
        """
        for _ in range(NUM_TRIES):
            try:
                return await self._ask_once(work, name, split, cost=cost)
            except BrokenProcessPool as error:
                log.debug("the pool broke: %s", error)
                if self._closed:
                    break
        raise WorkerDiedError("the scoring process does not stay alive: is there enough memory?")

    async def _ask_once(self, work: Callable[[Task], object], name: str, split: str, *, cost: ScoringCost) -> object:
        """Do the same; raise BrokenProcessPool if the pool broke for a reason other than `work`."""
        limits = self._limits
        pool = await self._running_pool()
        given = (work, name, split, limits.time_limit_s * cost.share)
        try:
            scheduled = pool.schedule(work_in_worker, args=given, timeout=limits.wall_limit_s)
        except RuntimeError as error:  # the pool broke or was closed since the check
            raise BrokenProcessPool(str(error)) from error
        future: asyncio.Future[Any] = asyncio.wrap_future(scheduled)
        self._in_flight.add(future)
        try:
            done, _ = await asyncio.wait({future}, timeout=limits.start_limit_s + limits.wall_limit_s)
            if not done:
                raise WorkerDiedError(f"the scoring process was not ready within {limits.start_limit_s:g} s")
            if future.cancelled():
                raise BrokenProcessPool("closed while a text was waiting")
            done_there: ScoringReply = future.result()
            cost.seconds += done_there.seconds
            if done_there.error is not None:
                raise done_there.error
            return done_there.value
        finally:
            self._in_flight.discard(future)
            future.cancel()

    async def _running_pool(self) -> Any:
        """Return the pool with its processes started, or a new one if the last pool broke, which can happen while idle.

        Raises BrokenProcessPool if the scorer is closed or a process cannot be started.
        """
        async with self._pool_change:
            if self._pool is not None and not self._pool.active:
                log.warning("the scoring process died, a new one is started")
                await self._stop_pool()
            if self._closed:
                raise BrokenProcessPool("the scorer is closed")
            if self._pool is None:
                self._pool = ProcessPool(
                    max_workers=1,
                    initializer=start_worker,
                    initargs=(self._isolated, os.getpid(), self._limits.memory_limit_bytes),
                    context=multiprocessing.get_context("spawn"),
                )
                await asyncio.to_thread(lambda pool: pool.active, self._pool)  # reading this attribute starts the pool
            return self._pool

    async def _drop_pool(self) -> None:
        async with self._pool_change:
            await self._stop_pool()

    async def _stop_pool(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            await asyncio.to_thread(pool.join)


async def score_answers(
    scorer: IsolatedScorer, item: TaskItem, texts: Sequence[str | None], *, cost: ScoringCost | None = None
) -> list[Score]:
    """Return the score of each text of `PromptTokenizer.answer_texts`; the reward 0 for None."""
    scores = iter(await scorer.score(item, [text for text in texts if text is not None], cost=cost))
    return [(0.0, CompletionStatus.SCORED) if text is None else next(scores) for text in texts]


def _score_here(task: Task, item: TaskItem, text: str) -> Score:
    try:
        return checked_score(task, item, text), CompletionStatus.SCORED
    except Exception as error:  # a faulty plug-in must not end the daemon
        log.warning("%s: scoring a text failed: %r", item.ref, error)
        return UNSCORED


def _check_can_travel(task: Task) -> None:
    try:
        ForkingPickler.dumps(task)
    except Exception as error:  # pickling runs code of the task
        raise TaskError(f"the task {task.name!r} needs isolated scoring but cannot be pickled: {error}") from error
