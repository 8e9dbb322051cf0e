"""What the scoring of one group cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ScoringCost:
    """Filled in by a scorer. `seconds`: processor time of a scoring process; the whole limit where a text was ended.

    `num_stopped`: texts that used up their processor time, or ended the process; none of them has a score.
    `num_lost`: texts that this machine did not finish: it is busy, or something else ended the process.
    """

    seconds: float = 0.0
    num_stopped: int = 0
    num_lost: int = 0

    @property
    def num_unfinished(self) -> int:
        """Texts without a score for either reason."""
        return self.num_stopped + self.num_lost
