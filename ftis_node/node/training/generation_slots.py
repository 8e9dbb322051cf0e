"""The slots of a node's own groups.

The generate loop takes a slot before generation. It becomes free when the generator serves the weights of the step that
used the group. So generation runs ahead of training by a bounded number of steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

MEASURED_GROUPS = 64  # the time per group follows about as many


@dataclass(eq=False)
class SlotPool:
    """Semaphore of `capacity` slots. `in_generation` slots have a group in generation, `held` slots one in the buffer.

    It measures the time per group by `clock`, in seconds, without the time in which no group is in generation. For one
    event loop.
    """

    capacity: int
    held: int = 0
    in_generation: int = 0
    clock: Callable[[], float] = time.monotonic
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _busy_s: float = field(default=0.0, init=False)
    _busy_since: float = field(default=0.0, init=False)
    _num_filled: float = field(default=0.0, init=False)

    @property
    def seconds_per_group(self) -> float:
        """Return the time per group while groups are generated; 0 before the first."""
        busy_s = self._busy_s + (self.clock() - self._busy_since if self.in_generation else 0.0)
        return busy_s / self._num_filled if self._num_filled else 0.0

    async def charge(self) -> None:
        """Take a slot as soon as one is free. (nothing) -> WAITING."""
        while self.in_generation + self.held >= self.capacity:
            self._changed.clear()
            await self._changed.wait()
        self._begin(1)

    def try_charge(self) -> bool:
        """Take a slot if one is free, and return whether it did."""
        is_free = self.in_generation + self.held < self.capacity
        self._begin(int(is_free))
        return is_free

    def fill(self) -> None:
        """Note that the group of a charged slot is stored. WAITING -> READY."""
        self._end()
        self.held += 1
        self._num_filled += 1
        if self._num_filled > MEASURED_GROUPS:
            self._num_filled, self._busy_s = self._num_filled / 2, self._busy_s / 2

    def cancel(self) -> None:
        """Free a charged slot without a group. WAITING -> (nothing)."""
        self._end()
        self._changed.set()

    def resize(self, capacity: int) -> None:
        """Set the number of slots. If more are in use, their groups still complete."""
        self.capacity = capacity
        self._changed.set()

    def set_held(self, held: int) -> None:
        """Set the number of own groups that the buffer holds, after a release or a resume."""
        self.held = held
        self._changed.set()

    def _begin(self, number: int) -> None:
        if not self.in_generation:
            self._busy_since = self.clock()
        self.in_generation += number

    def _end(self) -> None:
        self.in_generation -= 1
        if not self.in_generation:
            self._busy_s += self.clock() - self._busy_since
