"""Learning-rate schedule: a pure function of the step's number.

    rate
    peak |      ________                 constant
         |     /  '-._                   linear, cosine: from the peak to final_share of it
         |    /       '-._
         |   /            '-------       ... constant from here
         |__/________________________
            warmup   decay          step

So a resumed run needs no state for it, and every update on one batch has the same rate. Steps count from 1. No step of
a warm-up has the rate 0, and without a warm-up the first step has the peak.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ftis_node.config.optimizer import DEFAULT_FINAL_SHARE

if TYPE_CHECKING:
    from ftis_node.config.optimizer import OptimizerSection


def learning_rate(optimizer: OptimizerSection, step: int, *, peak: float) -> float:
    """Return the rate of step `step`, counted from 1; `peak` is the highest rate."""
    if step < optimizer.warmup_steps:
        return peak * step / optimizer.warmup_steps
    if optimizer.decay_steps is None:  # a constant rate
        return peak
    first_at_peak = max(1, optimizer.warmup_steps)
    progress = min(1.0, (step - first_at_peak) / optimizer.decay_steps)
    left = 1 - progress if optimizer.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    final_share = DEFAULT_FINAL_SHARE if optimizer.final_share is None else optimizer.final_share
    return peak * (final_share + (1 - final_share) * left)
