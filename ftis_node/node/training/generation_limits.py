"""What bounds generation: the slots of a node's own groups, and the budget of tokens.

The generate loop takes a slot before generation. It becomes free when the generator serves the weights of the step that
used the group. So generation runs ahead of training by a bounded number of steps.

The buffer stores the token counts of all own groups, also of deleted ones. So a restart neither loses tokens of the
budget nor counts them twice. A group that a crash interrupted does not count.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

log = logging.getLogger(__name__)
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


@dataclass(eq=False)
class GenerateBudget:
    """Budget of tokens to generate. A group in generation counts with the mean group size, to limit the excess.

    `num_tokens` in `num_groups` are generated, also in earlier starts of the home.
    """

    limit: int | None = None
    num_tokens: int = 0
    num_groups: int = 0
    num_under_way: int = field(default=0, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @property
    def may_begin(self) -> bool:
        if self.limit is None:
            return True
        if not self.num_groups:  # the mean group size is unknown before the first group
            return not self.num_under_way
        usual = self.num_tokens / self.num_groups
        return self.num_tokens + usual * self.num_under_way < self.limit

    @property
    def is_used_up(self) -> bool:
        """Return whether no further group may start, and none is in generation."""
        return self.limit is not None and not self.num_under_way and self.num_tokens >= self.limit

    def begin(self) -> None:
        self.num_under_way += 1

    def end(self, num_tokens: int) -> None:
        self.num_under_way -= 1
        self.num_tokens += num_tokens
        self.num_groups += 1
        self._changed.set()

    def abandon(self) -> None:
        """Note that a group ended without tokens: the node gave up its prompt."""
        self.num_under_way -= 1
        self._changed.set()

    async def until_more(self) -> None:
        """Wait until another group may start; forever if the budget is used up."""
        while not self.may_begin:
            self._changed.clear()
            if self.is_used_up:
                done, limit = self.num_tokens, self.limit
                log.info("%d tokens are generated, the budget of %d is used up: generation ends", done, limit)
            await self._changed.wait()
