"""What remains of a node's `[budget]`, counted over all starts of its home.

The count is of what the home keeps: tokens of own groups in the buffer, with those that were pruned. So a restart
neither forgets tokens nor counts them twice. A group that a crash cut off does not count.
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
    """Tokens that may be generated. A group that is under way counts as a usual one, so that little is made beyond."""

    def __init__(self, limit: int | None = None, *, num_tokens: int = 0, num_groups: int = 0) -> None:
        """`num_tokens` in `num_groups` were generated in former lives."""
        self._limit = limit
        self._num_tokens = num_tokens
        self._num_groups = num_groups
        self._num_under_way = 0
        self._changed = asyncio.Event()

    @property
    def may_begin(self) -> bool:
        """Return whether another group may be begun."""
        if self._limit is None:
            return True
        if not self._num_groups:  # nobody knows yet how much one takes
            return not self._num_under_way
        usual = self._num_tokens / self._num_groups
        return self._num_tokens + usual * self._num_under_way < self._limit

    @property
    def is_used_up(self) -> bool:
        """Return whether no group will be made any more, and none is under way."""
        return self._limit is not None and not self._num_under_way and self._num_tokens >= self._limit

    def begin(self) -> None:
        """Note that a group is under way."""
        self._num_under_way += 1

    def end(self, num_tokens: int) -> None:
        """Note that a group is made."""
        self._num_under_way -= 1
        self._num_tokens += num_tokens
        self._num_groups += 1
        self._changed.set()

    async def until_more(self) -> None:
        """Wait until another group may be begun; forever if the budget is used up."""
        while not self.may_begin:
            self._changed.clear()
            if self.is_used_up:
                log.info(
                    "%d tokens are generated, the budget of %d is used up: no more groups are made",
                    *(self._num_tokens, self._limit),
                )
            with waiting_for("nothing: its budget of tokens is used up" if self.is_used_up else "a group under way"):
                await self._changed.wait()


def generate_budget(limits: BudgetSection, *, num_tokens: int, num_groups: int) -> GenerateBudget:
    """Return the budget of a node whose home has so many own tokens in so many own groups."""
    return GenerateBudget(limits.generate_tokens, num_tokens=num_tokens, num_groups=num_groups)
