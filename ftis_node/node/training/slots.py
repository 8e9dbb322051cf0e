"""SlotPool: a semaphore over own groups, from the choice of a prompt to the weight sync of the step that uses them.

The generate loop takes a slot before generation. It becomes free when the generator serves the new weights of that
step. So generation runs ahead of training by a bounded number of steps.
"""

from __future__ import annotations

import asyncio


class SlotPool:
    """Semaphore of `capacity` slots. `waiting` slots have a group in generation; the others in use have one in the
    buffer. For one event loop."""

    def __init__(self, capacity: int, *, held: int = 0) -> None:
        """`held` slots are in use from the start, by groups of an earlier start in the buffer."""
        self.capacity = capacity
        self.waiting = 0
        self._held = held
        self._changed = asyncio.Event()

    async def charge(self) -> None:
        """Take a slot as soon as one is free. (nothing) -> WAITING."""
        while self.waiting + self._held >= self.capacity:
            self._changed.clear()
            await self._changed.wait()
        self.waiting += 1

    def try_charge(self) -> bool:
        """Take a slot if one is free, and return whether it did."""
        is_free = self.waiting + self._held < self.capacity
        self.waiting += is_free
        return is_free

    def fill(self) -> None:
        """Note that the group of a charged slot is stored. WAITING -> READY."""
        self.waiting -= 1
        self._held += 1

    def cancel(self) -> None:
        """Free a charged slot without a group. WAITING -> (nothing)."""
        self.waiting -= 1
        self._changed.set()

    def resize(self, capacity: int) -> None:
        """Set the number of slots. If more are in use, their groups still complete."""
        self.capacity = capacity
        self._changed.set()

    def set_held(self, held: int) -> None:
        """Set the number of own groups that the buffer holds, after a release or a resume."""
        self._held = held
        self._changed.set()
