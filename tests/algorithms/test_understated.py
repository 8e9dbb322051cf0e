"""`likelihood_gain`: values computed by hand, and its bound on honest samples."""

import math

import pytest
import torch

from ftis_node.algorithms.diagnostics import likelihood_gain


def test_by_hand():
    learner = torch.tensor([[-1.0, -2.0, math.nan], [-0.5, -0.25, -0.25]], requires_grad=True)
    behaviour = torch.tensor([[-4.0, -1.0, math.nan], [-12.0, -12.0, -12.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    gain = likelihood_gain(learner, behaviour, mask)
    assert gain.tolist() == pytest.approx([3.0 - math.log(2), 36.0 - 1.0 - math.log(2)])  # row 0: its first token
    assert not gain.requires_grad
    assert gain.dtype == torch.float64


@pytest.mark.parametrize("num_tokens", [8, 64])
def test_honest_samples_exceed_a_limit_at_most_as_often_as_the_bound(num_tokens):
    """Two unrelated policies: one samples 20,000 completions, the other scores them."""
    torch.manual_seed(7)
    generator, learner = torch.randn(num_tokens, 50).mul(1.5).log_softmax(1), torch.randn(num_tokens, 50).log_softmax(1)
    ids = torch.distributions.Categorical(logits=generator).sample(torch.Size([20_000]))[..., None]
    shape = (20_000, num_tokens)
    learner_logprobs, behaviour_logprobs = (
        table.expand(20_000, -1, -1).gather(2, ids).view(shape) for table in (learner, generator)
    )
    gain = likelihood_gain(learner_logprobs, behaviour_logprobs, torch.ones(shape, dtype=torch.bool))
    for limit in (1.0, 2.0, 4.0):
        assert (gain >= limit).double().mean() <= math.exp(-limit), limit


def test_the_gain_of_a_later_part_by_hand():
    """Four tokens of -20 nats precede four of +10. The sum is -40, and +40 from the fifth token, one of 7 starts."""
    learner = torch.tensor([[0.0] * 8])
    behaviour = torch.tensor([[20.0] * 4 + [-10.0] * 4])
    gain = likelihood_gain(learner, behaviour, torch.ones(1, 8, dtype=torch.bool))
    assert gain.item() == pytest.approx(40.0 - math.log(2 * 7))


@pytest.mark.parametrize("order", ["understated first", "understated last", "alternating"])
def test_overstated_tokens_do_not_hide_understated_ones(order):
    """The sum over the completion is below 0 in each case. With `alternating` no part gains enough to be detected."""
    num_tokens = 64
    low, high = torch.full((num_tokens // 2,), -4.0), torch.full((num_tokens // 2,), 5.0)
    gains = {
        "understated first": torch.cat([-low, -high]),
        "understated last": torch.cat([-high, -low]),
        "alternating": torch.stack([-low, -high], dim=1).flatten(),
    }[order]
    assert gains.sum() < 0
    behaviour = -gains[None]
    gain = likelihood_gain(torch.zeros(1, num_tokens), behaviour, torch.ones(1, num_tokens, dtype=torch.bool))
    assert (gain.item() > 16.0) is (order != "alternating")
