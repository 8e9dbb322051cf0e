"""SlotPool: how many own groups may be under way between a prompt and the hand-over of the weights they trained.

A slot is charged before generation and freed when the generator serves the weights of the step that used the group.
So the generator can run ahead of the learner by a bounded number of steps, and no further.
"""

from __future__ import annotations

import asyncio


class SlotPool:
    """`capacity` slots: `waiting` for a group that is being made, or held by one in the buffer. For one event loop."""

    def __init__(self, capacity: int, *, held: int = 0) -> None:
        """`held` slots are in use from the start, by groups that a former run left in the buffer."""
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

    def fill(self) -> None:
        """A charged slot's group is stored. WAITING -> READY."""
        self.waiting -= 1
        self._held += 1

    def cancel(self) -> None:
        """A charged slot's group will not come. WAITING -> (nothing)."""
        self.waiting -= 1
        self._changed.set()

    def resize(self, capacity: int) -> None:
        """Set the number of slots; groups under way beyond it complete."""
        self.capacity = capacity
        self._changed.set()

    def set_held(self, held: int) -> None:
        """Set the number of own groups that the buffer holds, after a release or a resume."""
        self._held = held
        self._changed.set()
