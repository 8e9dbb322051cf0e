"""Aggregation of a per-token objective to one scalar: the weight of each completion and of each token.

    seq_mean    1/N sum_i 1/L_i sum_t   every completion counts the same, a token of a long one less     GRPO, F-TIS
    token_mean  1/sum L sum_i sum_t     every token counts the same                                      DAPO
    max_len     1/(N L_max) sum_i sum_t every token counts the same; short batches get no larger weight  Dr.GRPO

`denominator` selects whether filtered completions count in the mean. `all`, as in the F-TIS paper: they count in N (and
in sum L). A batch that loses most of its completions then makes a small step. `kept`: only kept completions count.

A completion without tokens counts in N and adds nothing. Objectives of a whole sequence come as a column `[N, 1]`. Each
token of the sequence carries this value, so the mean over the tokens equals it.
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
    """Return the scalar mean of `objective` `[N, T]` or `[N, 1]` over the completions with `keep` `[N]`.

    `max_completion_length` is in tokens: the configured limit, not the number of columns. Otherwise a loss would depend
    on the longest completion of the batch. If nothing counts, the result is 0 and still has a (zero) gradient.
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
