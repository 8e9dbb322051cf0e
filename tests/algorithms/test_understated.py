"""How much likelier a learner may find what was honestly sampled: worked by hand, and the bound on real samples."""

from __future__ import annotations

import math

import pytest
import torch

from ftis_node.algorithms.diagnostics import likelihood_gain


def test_by_hand() -> None:
    learner = torch.tensor([[-1.0, -2.0, math.nan], [-0.5, -0.25, -0.25]], requires_grad=True)
    behaviour = torch.tensor([[-4.0, -1.0, math.nan], [-12.0, -12.0, -12.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    gain = likelihood_gain(learner, behaviour, mask)
    assert gain.tolist() == pytest.approx([3.0 - math.log(2), 36.0 - 1.0 - math.log(2)])  # the first: its first token
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


def test_a_part_behind_others_by_hand() -> None:
    """Four tokens of +10 nats behind four of -20: -40 in all, +40 from the fifth on, one of 7 later places."""
    learner = torch.tensor([[0.0] * 8])
    behaviour = torch.tensor([[20.0] * 4 + [-10.0] * 4])
    gain = likelihood_gain(learner, behaviour, torch.ones(1, 8, dtype=torch.bool))
    assert gain.item() == pytest.approx(40.0 - math.log(2 * 7))


@pytest.mark.parametrize("order", ["understated first", "understated last", "in turn"])
def test_what_is_overstated_elsewhere_does_not_hide_what_is_understated(order: str) -> None:
    """The sum over the whole completion is below 0 in each case; `in turn` hides it where no stretch gains enough."""
    num_tokens = 64
    low, high = torch.full((num_tokens // 2,), -4.0), torch.full((num_tokens // 2,), 5.0)
    gains = {
        "understated first": torch.cat([-low, -high]),
        "understated last": torch.cat([-high, -low]),
        "in turn": torch.stack([-low, -high], dim=1).flatten(),
    }[order]
    assert gains.sum() < 0
    behaviour = -gains[None]
    gain = likelihood_gain(torch.zeros(1, num_tokens), behaviour, torch.ones(1, num_tokens, dtype=torch.bool))
    assert (gain.item() > 16.0) is (order != "in turn")


def test_no_token_no_gain() -> None:
    none = torch.zeros(2, 0)
    assert (likelihood_gain(none, none, none.bool()) <= 0).all()
    padded = torch.zeros(1, 3)
    assert (likelihood_gain(padded, padded, padded.bool()) <= 0).all()
