"""Phases without and with attackers by turns, and what the honest senders' rate was in each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

PAIR_MINUTES = 9.0  # three without, six with attackers
QUIET_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of the run. `admitted`: groups of the honest senders; `sent`: those that they announced."""

    attacked: bool
    minutes: float
    admitted: int
    sent: int
    steps: int

    @property
    def rate(self) -> float:
        """Honest groups admitted a minute."""
        return self.admitted / self.minutes


def plan(minutes: float) -> list[tuple[bool, float]]:
    """`(attacked, minutes)` in their order. The last is one without, so that each attack lies between two of them."""
    pairs = max(2, round(minutes / PAIR_MINUTES))
    unit = minutes / (pairs + QUIET_SHARE)
    pair = [(False, unit * QUIET_SHARE), (True, unit * (1 - QUIET_SHARE))]
    return [*pair * pairs, (False, unit * QUIET_SHARE)]


def ratio(phases: Sequence[Phase]) -> tuple[float, float] | None:
    """The honest rate under attack as a share of the mean of the phases beside it: mean over attacks, standard error.

    None where no attack lies between two phases without; the error is NaN where only one does.
    """
    shares = [
        phase.rate / ((before.rate + after.rate) / 2)
        for before, phase, after in zip(phases, phases[1:], phases[2:], strict=False)
        if phase.attacked and before.rate + after.rate > 0
    ]
    if not shares:
        return None
    error = float(np.std(shares, ddof=1)) / math.sqrt(len(shares)) if len(shares) > 1 else math.nan
    return float(np.mean(shares)), error
