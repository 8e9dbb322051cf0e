"""Task monitor: records what each task of the node's loops waits for, to distinguish a stuck task from an idle one.

    with waiting_for("an envelope"):                 no time limit: it is no fault if none comes
        arrival = await self._arrivals.get()
    await self._judge(arrival)                       work, also if it awaits something: bounded by the monitor's limit

The monitor tracks a task from its first `waiting_for` on. The start and end of each wait reset its waiting time. Time
advances with ticks of the event loop, so it does not count an hour in which the process was suspended.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).parents[1]
AT_WORK = "its own work"
MAX_TICK_S = 5.0  # most time that one tick adds: a longer gap means a suspended process or a blocked event loop
_board: ContextVar[TaskMonitor | None] = ContextVar("board", default=None)


@dataclass(slots=True)
class TaskState:
    """State of one task: the name of its present wait, and the start of that wait in the monitor's time (s)."""

    task: asyncio.Task[Any]
    since: float
    waits_for: str = AT_WORK
    is_endless: bool = False
    is_reported: bool = False


class Stuck(NamedTuple):
    """A task that made no progress for `for_s` seconds; `stack` from its outermost to its innermost frame."""

    name: str
    waits_for: str
    for_s: float
    stack: list[str]

    def __str__(self) -> str:
        where = f" ({self.stack[-1]})" if self.stack else ""
        return f"the {self.name} loop is stuck: {self.waits_for} took {self.for_s:.0f} s so far{where}"


@dataclass(slots=True)
class TaskMonitor:
    """Table of task states of one node. `waiting_for` writes to it in tasks that are created after `install`."""

    limit_s: float
    now: float = 0.0
    _strands: dict[asyncio.Task[Any], TaskState] = field(default_factory=dict)

    def install(self) -> None:
        """Track the current task, and the tasks that it creates from now on."""
        _board.set(self)

    def tick(self, elapsed_s: float) -> None:
        """Advance the monitor's time."""
        self.now += min(elapsed_s, MAX_TICK_S)

    def strands(self) -> Iterator[tuple[str, TaskState, float]]:
        """Yield each task's name, state and waiting time (s); remove ended tasks."""
        for task in [task for task in self._strands if task.done()]:
            del self._strands[task]
        for task, strand in self._strands.items():
            yield task.get_name(), strand, self.now - strand.since

    def stuck(self) -> list[Stuck]:
        """Return all tasks that are stuck: their waiting time has reached `limit_s`."""
        return [_stuck(name, strand, for_s) for name, strand, for_s in self.strands() if self._is_stuck(strand, for_s)]

    def changes(self) -> tuple[list[Stuck], list[str]]:
        """Return tasks that got stuck since the last call, and the names of those that continue again."""
        news, again = [], []
        for name, strand, for_s in self.strands():
            is_stuck = self._is_stuck(strand, for_s)
            if is_stuck and not strand.is_reported:
                news.append(_stuck(name, strand, for_s))
            elif strand.is_reported and not is_stuck:
                again.append(name)
            strand.is_reported = is_stuck
        return news, again

    def _is_stuck(self, strand: TaskState, for_s: float) -> bool:
        return not strand.is_endless and for_s >= self.limit_s

    def strand(self, task: asyncio.Task[Any]) -> TaskState:
        """Return the state of a task; create it at first use."""
        return self._strands.setdefault(task, TaskState(task, since=self.now))


class waiting_for:  # lower case, so that it reads as words: with waiting_for("an envelope")
    """Context manager that names the wait of the current task. Without a `TaskMonitor` it does nothing."""

    __slots__ = ("_before", "_board", "_is_endless", "_strand", "_what")

    def __init__(self, what: str, *, endless: bool = True) -> None:
        """If `endless`, the wait may last forever without a fault; else the monitor's limit applies."""
        self._what = what
        self._is_endless = endless
        self._strand: TaskState | None = None

    def __enter__(self) -> None:
        board, task = _board.get(), asyncio.current_task()
        if board is None or task is None:
            return
        self._board = board
        self._strand = strand = board.strand(task)
        self._before = (strand.waits_for, strand.is_endless)
        strand.waits_for, strand.is_endless, strand.since = self._what, self._is_endless, board.now

    def __exit__(self, *exception: object) -> None:
        if self._strand is not None:
            self._strand.waits_for, self._strand.is_endless = self._before
            self._strand.since = self._board.now


async def pause(seconds: float) -> None:
    """Sleep, as a wait that may take any time."""
    with waiting_for("the clock"):
        await asyncio.sleep(seconds)


def _stuck(name: str, strand: TaskState, for_s: float) -> Stuck:
    return Stuck(name, strand.waits_for, for_s, stack_of(strand.task))


def stack_of(task: asyncio.Task[Any]) -> list[str]:
    """Return the stack of a suspended task, the innermost frame last: `node/loops/intake.py:97 _judge_all`.

    `Task.get_stack` returns only the outermost frame. So follow the attribute that references the awaited coroutine.
    """
    places: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        kind = "cr" if hasattr(awaited, "cr_frame") else "gi" if hasattr(awaited, "gi_frame") else "ag"
        frame = getattr(awaited, f"{kind}_frame", None)
        if frame is not None:
            places.append(f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}")
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None)
    return places


def short_path(filename: str) -> str:
    """Return the path of a file relative to the package; for a file outside it, the last two parts."""
    path = Path(filename)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else "/".join(path.parts[-2:])
