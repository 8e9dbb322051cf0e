"""Advantages of completions of a peer with another tokenizer."""

from __future__ import annotations

import math

import pytest
import torch

from ftis_node.algorithms import policy_loss
from ftis_node.algorithms.importance_weights import cross_tokenizer_advantages


def logs(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def test_positives_are_weighted_up_to_the_cap_and_others_are_filtered() -> None:
    advantages = cross_tokenizer_advantages(
        logs(0.2, 0.5, 0.2, 0.2), logs(0.4, 0.1, 0.4, 0.4), torch.tensor([3.0, 3.0, -3.0, 0.0])
    )
    assert advantages.tolist() == pytest.approx([1.5, 6.0, 0.0, 0.0])
    assert advantages.dtype == torch.float32


def test_an_infinite_cap_is_allowed_and_a_huge_ratio_is_capped() -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert cross_tokenizer_advantages(logs(0.8), logs(0.2), one, cap=math.inf).item() == pytest.approx(4.0)
    assert cross_tokenizer_advantages(one * 0, one * -1e6, one).item() == pytest.approx(2.0)


@pytest.mark.parametrize("method", ["nois", "tis", "ftis"])
def test_the_loss_with_these_advantages_is_weighted(method: str) -> None:
    learner = logs(0.2, 0.05).view(1, 2).requires_grad_()  # geometric mean 0.1
    advantages = cross_tokenizer_advantages(learner.mean(dim=1), logs(0.2), torch.ones(1, dtype=torch.float64))
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, metrics = policy_loss(method, learner, learner.detach(), mask, advantages, torch.zeros(1, dtype=torch.int64))
    loss.backward()
    assert learner.grad is not None
    assert learner.grad[0].tolist() == pytest.approx([-0.25, -0.25])
    assert metrics == {"kept_fraction": 1.0, "truncated_fraction": 0.0, "mean_kl": 0.0}


def test_an_invalid_argument_is_named() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="behaviour_mean_logprobs"):
        cross_tokenizer_advantages(one, torch.ones(2), one)
    with pytest.raises(ValueError, match="learner_mean_logprobs .*nan"):
        cross_tokenizer_advantages(one * math.nan, one, one)
    with pytest.raises(ValueError, match="cap"):
        cross_tokenizer_advantages(one, one, one, cap=0.0)
