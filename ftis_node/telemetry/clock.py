"""Unix time that does not jump.

A machine's clock is set: by minutes at boot, by hours when a battery was empty or a person was wrong. Times that others
sent are compared with that clock, because the swarm shares it. Durations on this machine must not jump. So bans are
counted by this clock: the wall clock at its creation, plus a steady clock since then.
"""

from __future__ import annotations

import time

JUMP_S = 2.0  # less is what clocks do while they are disciplined


class SteadyClock:
    """One for a process."""

    def __init__(self) -> None:
        self._began = time.time() - time.monotonic()
        self._last_offset = self._began

    def now(self) -> float:
        """Unix time in seconds; never goes back."""
        return self._began + time.monotonic()

    def jump_s(self) -> float | None:
        """Return by how much the wall clock was moved since the last call (s); None if it was not."""
        offset = time.time() - time.monotonic()
        jump = offset - self._last_offset
        if abs(jump) < JUMP_S:
            return None
        self._last_offset = offset
        return jump
