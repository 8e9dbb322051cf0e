"""Learning-rate schedule: a function of the step's number and nothing else.

    rate
    peak |      ________                 constant
         |     /  '-._                   linear, cosine: from the peak to final_share of it
         |    /       '-._
         |   /            '-------       ... constant from here
         |__/________________________
            warmup   decay          step

So a run that resumes needs no state for it, and every update on one batch has the same rate. Steps count from 1. No
step of a warm-up has the rate 0, and without a warm-up the first step has the peak.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec


class Schedule(msgspec.Struct, frozen=True):
    """`decay_steps` and `final_share` mean nothing to a constant rate."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    decay_steps: int = 1
    final_share: float = 0.1


def learning_rate(schedule: Schedule, step: int, *, peak: float) -> float:
    """Return the rate of step `step`, counted from 1; `peak` is the highest rate."""
    if step < schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    first_at_peak = max(1, schedule.warmup_steps)
    progress = min(1.0, (step - first_at_peak) / schedule.decay_steps)
    left = 1 - progress if schedule.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (schedule.final_share + (1 - schedule.final_share) * left)
