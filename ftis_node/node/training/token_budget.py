"""The budget of tokens that a node generates in its lifetime.

The buffer stores the token counts of all own groups, also of deleted ones. So a restart neither loses tokens of the
budget nor counts them twice. A group that a crash interrupted does not count.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


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
        """Note the end of a group of `num_tokens` tokens."""
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
