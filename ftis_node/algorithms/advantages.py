"""Advantages: how much better than its group a completion was.

`std` is GRPO's (arXiv 2402.03300) and the F-TIS paper's (arXiv 2605.22537): A = (r - mean) / (std + eps). The standard
deviation is unbiased and computed inside the group. `mean` is Dr.GRPO's (arXiv 2503.20783): A = r - mean. It does not
weight a prompt by the spread of its rewards. The F-TIS authors' code has the same effect.

The caller defines the groups by their ids. *Vertical*, the default: one generator makes all completions of a prompt.
*Horizontal*: several generators answer one prompt and share one id. GEPO's loss then needs other ids than the
advantages; see `importance_weights.group_expectation_ratio`.

Departure: equal rewards, and groups of one, give exactly 0. The formula alone does not: in float32 the mean of equal
rewards has a rounding error. Divided by eps = 1e-8, that error becomes an advantage of order 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ftis_node.algorithms.batch import (
    FLOATING,
    INTEGERS,
    group_extremes,
    group_index,
    group_sum,
    require_choice,
    require_finite,
    require_tensor,
)

SCALES = ("std", "mean")


def group_advantages(rewards: Tensor, group_ids: Tensor, scale: str = "std", eps: float = 1e-8) -> Tensor:
    """Return advantages `[N]` in the dtype of `rewards`.

    `rewards` is `[N]` float32 or float64, `group_ids` `[N]` integers in any order. Computes in float64.

    Raises ValueError for a wrong shape or dtype, a non-finite reward, an unknown `scale`, or an `eps` that is not a
    finite number >= 0.
    """
    require_choice("scale", scale, SCALES)
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps must be a finite number >= 0, not {eps!r}")
    num_completions = rewards.shape[0] if isinstance(rewards, Tensor) and rewards.dim() == 1 else 0
    require_tensor("rewards", rewards, dtypes=FLOATING, shape=(num_completions,))
    require_tensor("group_ids", group_ids, dtypes=INTEGERS, shape=(num_completions,))
    require_finite("rewards", rewards)

    exact = rewards.detach().double()
    index, num_groups = group_index(group_ids)
    sizes = group_sum(torch.ones_like(exact), index, num_groups)
    centred = exact - (group_sum(exact, index, num_groups) / sizes)[index]
    smallest, largest = group_extremes(exact, index, num_groups)
    centred = torch.where((smallest == largest)[index], 0.0, centred)
    if scale == "mean":
        return centred.to(rewards.dtype)
    variance = group_sum(centred.square(), index, num_groups) / (sizes - 1).clamp(min=1)
    # An advantage of 0 stays 0 even with eps = 0: the formula would compute 0 / 0 for an all-equal group.
    deviation = variance.sqrt()[index] + eps
    return torch.where(centred == 0, 0.0, centred / deviation).to(rewards.dtype)
