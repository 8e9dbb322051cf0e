"""Estimates how many own groups replace foreign groups in a step, if the run has `step.backfill_with_own`.

A step takes I own and J foreign groups; I + J is constant. A step is smaller if foreign groups do not arrive or are
refused. This node and the senders of the present foreign groups then share the shortfall evenly, because each of them
gets the groups of all others. If there is a surplus of foreign groups, the node generates fewer extra groups. It
divides the surplus by the same number of nodes and keeps the remainder for the next steps. So peers that send less
than one group per step also count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class ForeignShortfall:
    """Controller of `extra`: the own groups beyond I in the next step, which replace foreign ones; 0 at the start."""

    def __init__(self) -> None:
        self.extra = 0
        self._left = 0
        self._plenty = 0  # surplus of earlier steps that has not reduced `extra` yet

    def shares(self, own: int, foreign: int) -> tuple[int, int]:
        """Return I and J for the next step."""
        extra = min(self.extra, foreign)
        return own + extra, foreign - extra

    def note(self, wanted: int, senders: Sequence[str]) -> None:
        """Note the start of a step that takes up to `wanted` foreign groups. `senders` has one entry per READY group.

        Groups left from the last step are no surplus, because the buffer's stock shrinks: only new arrivals count.
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
