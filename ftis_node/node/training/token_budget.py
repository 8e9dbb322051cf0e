"""The remaining part of a node's `[budget]`, counted over all starts of its home.

The buffer stores the token counts of all own groups, also of deleted ones. So a restart neither loses tokens nor counts
them twice. A group that a crash interrupted does not count.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ftis_node.node.supervision.task_monitor import waiting_for

if TYPE_CHECKING:
    from ftis_node.config.limits import BudgetSection

log = logging.getLogger(__name__)


class GenerateBudget:
    """Budget of tokens to generate. A group in generation counts with the mean group size, to limit the excess."""

    def __init__(self, limit: int | None = None, *, num_tokens: int = 0, num_groups: int = 0) -> None:
        """`num_tokens` in `num_groups` were generated in earlier starts of the home."""
        self._limit = limit
        self._num_tokens = num_tokens
        self._num_groups = num_groups
        self._num_under_way = 0
        self._changed = asyncio.Event()

    @property
    def may_begin(self) -> bool:
        """Return whether another group may start."""
        if self._limit is None:
            return True
        if not self._num_groups:  # the mean group size is unknown before the first group
            return not self._num_under_way
        usual = self._num_tokens / self._num_groups
        return self._num_tokens + usual * self._num_under_way < self._limit

    @property
    def is_used_up(self) -> bool:
        """Return whether no further group may start, and none is in generation."""
        return self._limit is not None and not self._num_under_way and self._num_tokens >= self._limit

    def begin(self) -> None:
        """Note the start of a group."""
        self._num_under_way += 1

    def end(self, num_tokens: int) -> None:
        """Note the end of a group of `num_tokens` tokens."""
        self._num_under_way -= 1
        self._num_tokens += num_tokens
        self._num_groups += 1
        self._changed.set()

    async def until_more(self) -> None:
        """Wait until another group may start; forever if the budget is used up."""
        while not self.may_begin:
            self._changed.clear()
            if self.is_used_up:
                log.info(
                    "%d tokens are generated, the budget of %d is used up: generation ends",
                    *(self._num_tokens, self._limit),
                )
            with waiting_for("nothing: its budget of tokens is used up" if self.is_used_up else "a group under way"):
                await self._changed.wait()


def generate_budget(limits: BudgetSection, *, num_tokens: int, num_groups: int) -> GenerateBudget:
    """Return the budget for a home that has generated `num_tokens` in `num_groups` groups."""
    return GenerateBudget(limits.generate_tokens, num_tokens=num_tokens, num_groups=num_groups)
