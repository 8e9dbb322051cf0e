"""Sums over groups, for group ids of any value in any order, without a loop over groups or completions.

A *group* is the completions of one prompt by one generator; its id is any integer that its completions share.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_index(group_ids: Tensor) -> tuple[Tensor, int]:
    """Return ids `[N]` of any value as positions `[N]` in 0..G-1, and the number of groups G."""
    unique_ids, index = torch.unique(group_ids, return_inverse=True)
    return index, len(unique_ids)


def group_sum(values: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """Return the sum of `values` `[N]` over each group, `[G]`."""
    return values.new_zeros(num_groups).index_add(0, index, values)


def group_extremes(values: Tensor, index: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest of `values` `[N]` in each group, two tensors `[G]`."""
    empty = values.new_zeros(num_groups)
    smallest = empty.scatter_reduce(0, index, values, "amin", include_self=False)
    largest = empty.scatter_reduce(0, index, values, "amax", include_self=False)
    return smallest, largest


def group_logsumexp(values: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """Return log sum exp of `values` `[N]` over each group, `[G]`. Subtracts the maximum first to prevent overflow."""
    _, largest = group_extremes(values, index, num_groups)
    return largest + group_sum(torch.exp(values - largest[index]), index, num_groups).log()
