"""Estimates how many foreign groups of a step own groups replace, if the run has `step.backfill_with_own`.

Foreign groups that do not come, or are refused, make a step smaller. The next step makes up for the shortfall. This
node and each peer whose groups came make an even part of it more, because all of them get what one makes. If peers
send more again, the node makes less, by as many groups as all of them can leave out without a new shortfall. The
remainder of that division is added to the surplus of the next steps. So a peer slower than a group a step counts too.
I + J stays as it is.
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
        """Return I and J for the next step."""
        extra = min(self.extra, foreign)
        return own + extra, foreign - extra

    def note(self, wanted: int, senders: Sequence[str]) -> None:
        """Note the start of a step of up to `wanted` foreign groups; `senders` has the sender of each present group.

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
