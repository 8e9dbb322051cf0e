"""Task monitor: records what each task of the node's loops waits for, to distinguish a stuck task from an idle one.

    arrival = await waiting("an envelope", self._arrivals.get())    no time limit: it is no fault if none comes
    await self._judge(arrival)                                      work: bounded by the monitor's limit

The monitor tracks a task from its first `waiting_for` on. The start and end of each wait reset its waiting time. Time
advances with ticks of the event loop, so it does not count an hour in which the process was suspended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

PACKAGE = Path(__file__).parents[1]
R = TypeVar("R")
AT_WORK = "its own work"
MAX_TICK_S = 5.0  # most time that one tick adds: a longer gap means a suspended process or a blocked event loop
_monitor: ContextVar[TaskMonitor | None] = ContextVar("monitor", default=None)


@dataclass(slots=True)
class TaskState:
    """State of one task: the name of its present wait, and the start of that wait in the monitor's time (s)."""

    task: asyncio.Task[Any]
    since: float
    waits_for: str = AT_WORK
    is_endless: bool = False


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
    _states: dict[asyncio.Task[Any], TaskState] = field(default_factory=dict)

    def install(self) -> None:
        """Track the current task, and the tasks that it creates from now on."""
        _monitor.set(self)

    def tick(self, elapsed_s: float) -> None:
        """Advance the monitor's time."""
        self.now += min(elapsed_s, MAX_TICK_S)

    def states(self) -> Iterator[tuple[str, TaskState, float]]:
        """Yield each task's name, state and waiting time (s); remove ended tasks."""
        self._states = {task: state for task, state in self._states.items() if not task.done()}
        for task, state in self._states.items():
            yield task.get_name(), state, self.now - state.since

    def stuck(self) -> list[Stuck]:
        """Return all tasks that are stuck: their waiting time has reached `limit_s`."""
        return [
            Stuck(name, state.waits_for, for_s, stack_of(state.task))
            for name, state, for_s in self.states()
            if not state.is_endless and for_s >= self.limit_s
        ]

    def state_of(self, task: asyncio.Task[Any]) -> TaskState:
        """Return the state of a task; create it at first use."""
        return self._states.setdefault(task, TaskState(task, since=self.now))


@contextmanager
def waiting_for(what: str, *, endless: bool = True) -> Iterator[None]:
    """Name the wait of the current task while the block runs. Without a `TaskMonitor` this does nothing.

    If `endless`, the wait may last forever without a fault; else the monitor's limit applies.
    """
    monitor, task = _monitor.get(), asyncio.current_task()
    if monitor is None or task is None:
        yield
        return
    state = monitor.state_of(task)
    before = state.waits_for, state.is_endless
    state.waits_for, state.is_endless, state.since = what, endless, monitor.now
    try:
        yield
    finally:
        state.waits_for, state.is_endless = before
        state.since = monitor.now


async def waiting(what: str, work: Awaitable[R], *, endless: bool = True) -> R:
    """Return the result of `work`, awaited under this name (`waiting_for`)."""
    with waiting_for(what, endless=endless):
        return await work


async def wait_at_most(limit_s: float | None, what: str, event: asyncio.Event) -> None:
    """Wait until `event` is set, for `limit_s` at most; None: without a limit."""
    with suppress(TimeoutError), waiting_for(what):
        async with asyncio.timeout(limit_s):
            await event.wait()


async def sleep(seconds: float) -> None:
    """Sleep, as a wait that may take any time."""
    await waiting("the clock", asyncio.sleep(seconds))


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
            places.append(f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}")
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None)
    return places


def _short(filename: str) -> str:
    """Return the path of a file relative to the package; for a file outside it, the last two parts."""
    path = Path(filename)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else "/".join(path.parts[-2:])
