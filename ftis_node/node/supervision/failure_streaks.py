"""Failures in a row, by kind of work.

A failure that lasts for hours gives a few events and log lines. Events come at the first failure in a row and at each
doubling of their number. Log lines come from the point on at which the status shows the kind of work. A success ends
the row.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ftis_node.errors import first_line

log = logging.getLogger(__name__)
NUM_FAILING = 3  # failures in a row after which the status shows the work


@dataclass(slots=True)
class FailureStreak:
    """Failures in a row of one kind of work."""

    num_failing: int = NUM_FAILING
    num_in_row: int = 0
    has_succeeded: bool = False  # since the start of the node
    error: str = ""

    @property
    def is_failing(self) -> bool:
        return self.num_in_row >= self.num_failing


@dataclass(slots=True)
class FailureStreaks:
    """Table of the streaks of one node, by kind of work."""

    _streaks: dict[str, FailureStreak] = field(default_factory=dict)

    def expect(self, work: str, *, num_failing: int) -> None:
        """Set after how many failures in a row the status shows `work`."""
        self.streak(work).num_failing = num_failing

    def failed(self, work: str, error: Exception) -> bool:
        """Count a failure. Return whether to write an event: for the 1st, 2nd, 4th, 8th, ... in a row.

        Log the first failure of work that has not succeeded yet, then from the point at which the status shows it.
        """
        streak = self.streak(work)
        streak.num_in_row += 1
        streak.error = first_line(error)
        is_due = streak.num_in_row & (streak.num_in_row - 1) == 0
        is_first_of_all = streak.num_in_row == 1 and not streak.has_succeeded
        if is_first_of_all or streak.num_in_row == streak.num_failing or (is_due and streak.is_failing):
            log.warning("%s; the node tries again", _sentence(work, streak))
        return is_due

    def succeeded(self, work: str) -> None:
        streak = self.streak(work)
        if streak.is_failing:
            log.info("%s works again after %d failures", work, streak.num_in_row)
        streak.num_in_row, streak.has_succeeded = 0, True

    def streak(self, work: str) -> FailureStreak:
        return self._streaks.setdefault(work, FailureStreak())

    @property
    def failing(self) -> list[str]:
        return [_sentence(work, streak) for work, streak in self._streaks.items() if streak.is_failing]


def _sentence(work: str, streak: FailureStreak) -> str:
    times = "" if streak.num_in_row == 1 else f" {streak.num_in_row} times in a row"
    return f"{work} failed{times}: {streak.error}"
