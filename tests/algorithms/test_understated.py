"""How much likelier a learner may find what was honestly sampled: worked by hand, and the bound on real samples."""

from __future__ import annotations

import math

import pytest
import torch

from ftis_node.algorithms import likelihood_gain


def test_by_hand() -> None:
    learner = torch.tensor([[-1.0, -2.0, math.nan], [-0.5, -0.25, -0.25]], requires_grad=True)
    behaviour = torch.tensor([[-4.0, -1.0, math.nan], [-12.0, -12.0, -12.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    gain = likelihood_gain(learner, behaviour, mask)
    assert gain.tolist() == [3.0 - 1.0, 36.0 - 1.0]
    assert not gain.requires_grad
    assert gain.dtype == torch.float64


@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_honest_samples_pass_a_limit_no_oftener_than_the_bound(num_tokens: int) -> None:
    """Two policies that have nothing to do with each other; 20,000 completions of the one, judged by the other."""
    torch.manual_seed(7)
    generator, learner = torch.randn(num_tokens, 50).mul(1.5).log_softmax(1), torch.randn(num_tokens, 50).log_softmax(1)
    ids = torch.distributions.Categorical(logits=generator).sample(torch.Size([20_000]))[..., None]
    shape = (20_000, num_tokens)
    found, said = (table.expand(20_000, -1, -1).gather(2, ids).view(shape) for table in (learner, generator))
    gain = likelihood_gain(found, said, torch.ones(shape, dtype=torch.bool))
    for limit in (1.0, 2.0, 4.0):
        assert (gain >= limit).double().mean() <= math.exp(-limit), limit
