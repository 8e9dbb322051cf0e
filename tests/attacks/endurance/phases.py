"""Alternating quiet phases and attacks, and the honest senders' rate in each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

PAIR_MINUTES = 9.0  # three quiet, six with attackers
QUIET_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run. `sent` counts the groups that the honest senders announced, `admitted` those in the buffer."""

    attacked: bool
    minutes: float
    admitted: int
    sent: int
    steps: int

    @property
    def rate(self) -> float:
        """Admitted honest groups per minute."""
        return self.admitted / self.minutes


def plan(minutes: float) -> list[tuple[bool, float]]:
    """Return `(attacked, minutes)` in order. The last phase is quiet, so each attack is between two quiet phases."""
    pairs = max(2, round(minutes / PAIR_MINUTES))
    unit = minutes / (pairs + QUIET_SHARE)
    pair = [(False, unit * QUIET_SHARE), (True, unit * (1 - QUIET_SHARE))]
    return [*pair * pairs, (False, unit * QUIET_SHARE)]


def ratio(phases: Sequence[Phase]) -> tuple[float, float] | None:
    """Return the honest rate under attack relative to the mean of the adjacent quiet phases, and its standard error.

    The ratio is a mean over attacks. It is None without an attack between two quiet phases. With one attack the error
    is NaN.
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
