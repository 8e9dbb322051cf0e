"""The KL to the starting model: value and gradient against sums computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from ftis_node.algorithms.loss import kl_to_start

MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
LEARNER = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, math.nan, 9.0], [math.inf, 0.0, 0.0]], dtype=torch.float64)
REFERENCE = torch.tensor([[-1.5, -2.0, -0.1], [-1.0, 0.0, math.nan], [0.0, 0.0, 0.0]], dtype=torch.float64)
DIFFERENCES = {(0, 0): -0.5, (0, 1): 0.0, (0, 2): 0.4, (1, 0): 2.0}  # reference minus learner, at tokens
WEIGHTS = {
    "seq_mean": {(0, 0): 1 / 9, (0, 1): 1 / 9, (0, 2): 1 / 9, (1, 0): 1 / 3},
    "token_mean": dict.fromkeys(DIFFERENCES, 1 / 4),
    "max_len": dict.fromkeys(DIFFERENCES, 1 / 30),
}


@pytest.mark.parametrize("agg", sorted(WEIGHTS))
def test_value_and_gradient_by_hand(agg: str) -> None:
    learner = LEARNER.clone().requires_grad_()
    value = kl_to_start(learner, REFERENCE, MASK, agg=agg, max_completion_length=10)
    (gradient,) = torch.autograd.grad(value, learner)
    weights = WEIGHTS[agg]
    expected = sum(weights[cell] * (math.exp(d) - d - 1) for cell, d in DIFFERENCES.items())
    assert value.item() == pytest.approx(expected, rel=1e-12)
    by_hand = torch.zeros(3, 3, dtype=torch.float64)
    for cell, difference in DIFFERENCES.items():
        by_hand[cell] = weights[cell] * (1 - math.exp(difference))
    torch.testing.assert_close(gradient, by_hand, rtol=1e-12, atol=0)


@pytest.mark.parametrize("agg", sorted(WEIGHTS))
def test_the_kl_of_a_batch_is_the_sum_over_its_tokens(agg: str) -> None:
    """So a step may divide a batch. The other tokens have no difference here."""
    whole = kl_to_start(LEARNER, REFERENCE, MASK, agg=agg, max_completion_length=10)
    alone = []
    for cell in DIFFERENCES:
        learner = REFERENCE.clone()
        learner[cell] = LEARNER[cell]
        alone.append(kl_to_start(learner, REFERENCE, MASK, agg=agg, max_completion_length=10))
    assert sum(alone).item() == pytest.approx(whole.item(), rel=1e-12)


def test_a_tiny_difference_is_squared_and_a_huge_one_is_finite() -> None:
    """A tiny difference gives half its square. A huge one gives a finite value and a gradient towards the start."""
    one = torch.ones(1, 1, dtype=torch.bool)
    tiny = kl_to_start(torch.tensor([[-1.0]]).double(), torch.tensor([[-1.0 + 1e-6]]).double(), one, agg="seq_mean")
    assert tiny.item() == pytest.approx(5e-13, rel=1e-3)
    learner = torch.tensor([[-500.0]], requires_grad=True)
    far = kl_to_start(learner, torch.tensor([[-0.1]]), one, agg="seq_mean")
    (gradient,) = torch.autograd.grad(far, learner)
    assert math.isfinite(far.item())
    assert gradient.item() == pytest.approx(1 - math.exp(20))
