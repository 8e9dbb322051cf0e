"""Unix time that does not jump if the machine's clock is set, and a detector of suspended machines and processes.

NTP or a user may move the wall clock by minutes or hours. Times from peers are compared with the wall clock, because
the swarm shares it. Durations on this machine, such as bans, must not jump. They use this clock: the wall clock at its
creation plus the time since then, also that in which the machine slept.
"""

from __future__ import annotations

import time
from collections.abc import Callable

JUMP_S = 2.0  # smaller changes are normal clock corrections
NOTABLE_SKEW_S = 1.0  # between two machines
REFUSED_SKEW_S = 3.0  # hivemind peers refuse messages with more
SLEPT_S = 30.0  # a shorter gap may come from a busy machine


def since_boot_s() -> float:
    """Return a monotonic time in seconds that, unlike `time.monotonic`, advances while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """Clock that never goes back. A process has one."""

    def __init__(self) -> None:
        self._began = time.time() - since_boot_s()
        self._last_offset = self._began

    def now(self) -> float:
        """Return Unix time in seconds."""
        return self._began + since_boot_s()

    def jump_s(self) -> float | None:
        """Return the jump of the wall clock since the last call, in seconds; None if it is below `JUMP_S`."""
        offset = time.time() - since_boot_s()
        jump = offset - self._last_offset
        if abs(jump) < JUMP_S:
            return None
        self._last_offset = offset
        return jump


class SleepDetector:
    """Detector of a time in which the machine, or this process, was suspended."""

    def __init__(self, clock: Callable[[], float] = since_boot_s) -> None:
        self._clock = clock
        self._last_at: float | None = None

    def slept_s(self, *, period_s: float) -> float | None:
        """Return the seconds beyond `period_s` since the last call; None if they are below `SLEPT_S`.

        Call it once in each period.
        """
        last_at, self._last_at = self._last_at, self._clock()
        beyond_s = 0.0 if last_at is None else self._last_at - last_at - period_s
        return beyond_s if beyond_s >= SLEPT_S else None
