"""Unix time that does not jump if the machine's clock is set.

NTP or a user may move the wall clock by minutes or hours. Times from peers are compared with the wall clock, because
the swarm shares it. Durations on this machine, such as bans, must not jump. They use this clock: the wall clock at its
creation plus the monotonic time since then.
"""

from __future__ import annotations

import time

JUMP_S = 2.0  # smaller changes are normal clock corrections


class SteadyClock:
    """Clock that never goes back. A process has one."""

    def __init__(self) -> None:
        self._began = time.time() - time.monotonic()
        self._last_offset = self._began

    def now(self) -> float:
        """Return Unix time in seconds."""
        return self._began + time.monotonic()

    def jump_s(self) -> float | None:
        """Return the jump of the wall clock since the last call, in seconds; None if it is below `JUMP_S`."""
        offset = time.time() - time.monotonic()
        jump = offset - self._last_offset
        if abs(jump) < JUMP_S:
            return None
        self._last_offset = offset
        return jump
