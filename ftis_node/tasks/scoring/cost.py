from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ScoringCost:
    """Cost of scoring one group. `seconds` is CPU time of the scoring process, or the full limit if it was killed.

    `num_stopped` counts texts that used up their CPU time or ended the process. `num_lost` counts texts that this
    machine did not finish, because it is busy or because something else ended the process. None of these texts has a
    score.
    """

    seconds: float = 0.0
    num_stopped: int = 0
    num_lost: int = 0

    @property
    def num_unfinished(self) -> int:
        """Return the number of texts without a score."""
        return self.num_stopped + self.num_lost
