"""Helpers to write batches whose results can be computed by hand.

Rows contain probabilities, because their ratios are easy to see: `rows([[0.5, 0.2]], [[0.25, 0.2]])` has rho = 2 and
rho = 1. Rows may differ in length. The rest is padding of NaN, so a method that reads padding fails.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from ftis_node.algorithms import policy_loss


def padded_logs(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """Return the logarithms of ragged rows, `[N, T]` float64, with NaN after each row's end."""
    num_columns = max(len(row) for row in rows)
    return torch.tensor(
        [[math.log(value) for value in row] + [math.nan] * (num_columns - len(row)) for row in rows],
        dtype=torch.float64,
    )


def rows(
    learner: Sequence[Sequence[float]],
    behaviour: Sequence[Sequence[float]],
    advantages: Sequence[float],
    group_ids: Sequence[int] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the tensor arguments of `policy_loss`. Without `group_ids` all rows are one group."""
    learner_logprobs = padded_logs(learner)
    return {
        "learner_logprobs": learner_logprobs.requires_grad_(),
        "behaviour_logprobs": padded_logs(behaviour),
        "mask": ~learner_logprobs.detach().isnan(),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "group_ids": torch.tensor(group_ids if group_ids is not None else [0] * len(advantages)),
    }


def evaluate(
    method: str, batch: dict[str, torch.Tensor], **params: Any
) -> tuple[float, list[list[float]], dict[str, float]]:
    """Return minus the loss, the gradient of that, and the metrics."""
    batch = batch | {"learner_logprobs": batch["learner_logprobs"].detach().clone().requires_grad_()}
    loss, metrics = policy_loss(method, **batch, **params)
    loss.backward()
    gradient = batch["learner_logprobs"].grad
    assert gradient is not None
    return -loss.item(), (-gradient).tolist(), metrics
