"""From an objective per token to one number: what a completion, and what a token, counts.

    seq_mean    1/N sum_i 1/L_i sum_t   every completion counts the same, a token of a long one less     GRPO, F-TIS
    token_mean  1/sum L sum_i sum_t     every token counts the same                                      DAPO
    max_len     1/(N L_max) sum_i sum_t the same, and a batch of short answers is not blown up           Dr.GRPO

`denominator` says what happens to the completions that a filter left out. `all`: they still count in N (and in sum L),
so that a batch of which little is kept makes a small step; the F-TIS paper's. `kept`: only the kept ones count.

A completion without tokens counts in N and adds nothing. Objectives of a whole sequence come as a column `[N, 1]`: each
token of it then carries the sequence's value, and the mean over the tokens gives that value back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ftis_node.algorithms.batch import Batch

AGGREGATIONS = ("seq_mean", "token_mean", "max_len")
DENOMINATORS = ("all", "kept")


def aggregate(
    objective: Tensor, batch: Batch, keep: Tensor, *, agg: str, denominator: str, max_completion_length: int | None
) -> Tensor:
    """Scalar mean of `objective` `[N, T]` or `[N, 1]` over the completions where `keep` `[N]` is true.

    `max_completion_length` is in tokens: the configured limit, not the columns at hand, or a loss would depend on its
    longest neighbour. Where nothing counts the result is 0, still with a path for the (zero) gradient.
    """
    counted = keep if denominator == "kept" else torch.ones_like(keep)
    kept_values = torch.where(batch.mask & keep[:, None], objective, 0.0)
    if agg == "token_mean":
        return kept_values.sum() / (batch.num_tokens * counted).sum().clamp(min=1)
    num_counted = counted.sum().clamp(min=1)
    if agg == "max_len":
        assert max_completion_length is not None  # settings.py refuses `max_len` without it
        return kept_values.sum() / (num_counted * max_completion_length)
    return (kept_values.sum(dim=1) / batch.num_tokens.clamp(min=1)).sum() / num_counted
