"""Estimates how many foreign groups of a step own groups replace, if the run has `step.backfill_with_own`.

Foreign groups that do not come, or are refused, make a step smaller. What was missing in one step is made up for in the
next: this node and those whose groups came each make an even part of it more, for what one makes all of them get. Where
peers send more again, so much less is made as all of them can leave out without a new lack; what does not divide evenly
counts with the next steps' plenty, so that a peer slower than a group a step is taken up too. I + J stays as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class ForeignShortfall:
    """`extra` own groups beyond I in the next step, in place of as many foreign ones; none at first."""

    def __init__(self) -> None:
        self.extra = 0
        self._left = 0
        self._plenty = 0  # of steps before, not yet left out

    def shares(self, own: int, foreign: int) -> tuple[int, int]:
        """I and J as the next step takes them."""
        extra = min(self.extra, foreign)
        return own + extra, foreign - extra

    def note(self, wanted: int, senders: Sequence[str]) -> None:
        """A step starts that takes up to `wanted` foreign groups; `senders` made those that are there, a name a group.

        More than were wanted is a plenty only where so many came since the last step: a stock is used up.
        """
        ready, sharers = len(senders), 1 + len(set(senders))
        missing, plenty = wanted - ready, ready - self._left - wanted
        self._left = max(0, -missing)
        if missing > 0:
            self.extra += -(-missing // sharers)
            self._plenty = 0
        elif plenty > 0:
            less, self._plenty = divmod(self._plenty + plenty, sharers)
            self.extra = max(0, self.extra - less)
