"""Pauses of a node: the decision, and the gate of the loops that compute.

The decision is a pure function of the settings, the last command, time and the facts of a `MachineObserver`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from ftis_node.config.schedule import ScheduleSection, is_within, next_start, parse_hours
from ftis_node.errors import UsageError
from ftis_node.node.supervision.machine_observer import MachineFacts
from ftis_node.telemetry.status import PauseStatus


@dataclass(frozen=True, slots=True)
class Command:
    """The operator's last command. `run` overrides the schedule; "" leaves the decision to it.

    It ends at the Unix time `until`; None: never.
    """

    action: Literal["", "pause", "run"] = ""
    until: float | None = None

    def at(self, now: float) -> Literal["", "pause", "run"]:
        return self.action if self.until is None or now < self.until else ""


@dataclass(frozen=True, slots=True)
class Decision:
    """Run, or pause for a `reason` until a Unix time; None: the end is unknown."""

    reason: str = ""
    until: float | None = None

    @property
    def is_pause(self) -> bool:
        return bool(self.reason)


RUN = Decision()


def length_of(arguments: Mapping[str, Any], *, most_s: float) -> float | None:
    """Return the seconds in the argument `for_s` of an operator's command, None without it. Raise UsageError."""
    length_s = arguments.get("for_s")
    if length_s is None:
        return None
    if isinstance(length_s, bool) or not isinstance(length_s, int | float) or not 0 < length_s <= most_s:
        most = f"{most_s:.0f} ({most_s / 86400:.0f} d)"
        raise UsageError(f"--for (for_s) is a number of seconds above 0, at most {most}, not {length_s!r:.40}")
    return float(length_s)


def decide(schedule: ScheduleSection, command: Command, facts: MachineFacts, *, now: float) -> Decision:
    """Return the decision at the Unix time `now`. A command comes before the schedule."""
    ranges = parse_hours(schedule.hours)
    match command.at(now):
        case "run":
            return RUN
        case "pause":
            until = command.until
            if until is not None and ranges and not is_within(ranges, until):
                until = next_start(ranges, until)
            return Decision("by command", until)
    if ranges and not is_within(ranges, now):
        return Decision(f"outside schedule.hours {schedule.hours}", next_start(ranges, now))
    if facts.on_battery and schedule.when_on_battery == "pause":
        return Decision("the machine runs on its battery")
    if facts.programs:
        return Decision(f"{', '.join(facts.programs)} is running")
    if facts.gpu_users and schedule.when_gpu_is_used == "pause":
        return Decision(f"{', '.join(facts.gpu_users)} uses the GPU")
    return RUN


class PauseGate:
    """A gate for new work, and a lock that a step or an evaluation holds. For one event loop.

    `decision` is the present one. `num_pauses` counts those after which the workers are new processes.
    """

    def __init__(self) -> None:
        self.decision = RUN
        self.num_pauses = 0
        self.is_in_effect = False  # the workers have ended
        self._since: float | None = None  # Unix time
        self._resumed_at: float | None = None  # Unix time
        self._stopped_at: float | None = None  # monotonic
        self._stopped_s = 0.0
        self._running = asyncio.Event()
        self._running.set()
        self._work = asyncio.Lock()

    @property
    def is_paused(self) -> bool:
        """Return whether a pause has begun. A step in progress still ends."""
        return not self._running.is_set()

    def clock(self) -> float:
        """Return the seconds of a monotonic clock that does not run while the workers have ended or load the model."""
        now = time.monotonic() if self._stopped_at is None else self._stopped_at
        return now - self._stopped_s

    async def wait_running(self) -> None:
        await self._running.wait()

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Delay the effect of a pause while the block runs. During a pause, wait for its end first."""
        async with self._work:
            yield

    async def begin(self, decision: Decision) -> None:
        """Admit no new work. Return when the work in progress has ended."""
        self.decision, self._since = decision, time.time()
        self._running.clear()
        await self._work.acquire()

    def take_effect(self) -> None:
        self.is_in_effect = True
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        self.num_pauses += 1

    def lose_effect(self) -> None:
        """Note that the pause ends and the workers start. `end` follows when they are ready."""
        self.decision, self.is_in_effect = RUN, False

    def end(self) -> float:
        """Admit work again. Return the length of the pause in seconds."""
        assert self._since is not None, "a pause has begun"
        self._resumed_at = time.time()
        length_s = self._resumed_at - self._since
        self.decision, self._since, self.is_in_effect = RUN, None, False
        if self._stopped_at is not None:
            self._stopped_s += time.monotonic() - self._stopped_at
            self._stopped_at = None
        self._work.release()
        self._running.set()
        return length_s

    def status(self) -> PauseStatus:
        return PauseStatus(self.decision.reason, self.decision.until, self.is_in_effect, self._resumed_at)
