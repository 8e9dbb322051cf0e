"""The mixture of experts' probabilities: values computed by hand, and general properties.

Two experts over the tokens a, b, c and the text "a a". After every text, expert 0 gives a 1/2, b 1/4, c 1/4 and expert
1 gives a 1/4, b 1/4, c 1/2.

    text so far   p_0(text)  p_1(text)   posterior from the prior 1/2, 1/2
    ""            1          1           1/2, 1/2
    "a"           1/2        1/4         (1/2) / (1/2 + 1/4) = 2/3, 1/3
    "a a"         1/4        1/16        (1/4) / (1/4 + 1/16) = 4/5, 1/5

The mixture's next token:

    after ""      a 1/2 * 1/2 + 1/2 * 1/4 = 3/8,   b 1/4,   c 1/2 * 1/4 + 1/2 * 1/2 = 3/8
    after "a"     a 2/3 * 1/2 + 1/3 * 1/4 = 5/12,  b 1/4,   c 2/3 * 1/4 + 1/3 * 1/2 = 1/3
    after "a a"   a 4/5 * 1/2 + 1/5 * 1/4 = 9/20,  b 1/4,   c 4/5 * 1/4 + 1/5 * 1/2 = 3/10
"""

import math

import pytest
import torch
from torch import Tensor

from ftis_node.algorithms.mixture import mixture_logprobs, posterior

IMPOSSIBLE = -math.inf


def logs(values: list[list[float]] | list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def uniform_prior(num_experts: int) -> Tensor:
    return logs([1 / num_experts] * num_experts)


EXPERTS = [[1 / 2, 1 / 4, 1 / 4], [1 / 4, 1 / 4, 1 / 2]]
BY_HAND = [
    ([1.0, 1.0], [1 / 2, 1 / 2], [3 / 8, 1 / 4, 3 / 8]),
    ([1 / 2, 1 / 4], [2 / 3, 1 / 3], [5 / 12, 1 / 4, 1 / 3]),
    ([1 / 4, 1 / 16], [4 / 5, 1 / 5], [9 / 20, 1 / 4, 3 / 10]),
]


@pytest.mark.parametrize(("likelihoods", "weights", "next_token"), BY_HAND)
def test_posterior_and_mixture_by_hand(likelihoods, weights, next_token):
    log_posterior = posterior(logs([1 / 2, 1 / 2]), logs(likelihoods))
    torch.testing.assert_close(log_posterior, logs(weights), rtol=1e-12, atol=1e-15)
    mixed = mixture_logprobs(logs(EXPERTS), log_posterior)
    torch.testing.assert_close(mixed, logs(next_token), rtol=1e-12, atol=1e-15)


def some_experts(num_experts: int, *, rows: int, num_ids: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(num_experts, rows, num_ids, generator=generator)).log_softmax(dim=-1)


def test_a_mixture_of_one_expert_equals_the_expert():
    experts = some_experts(1, rows=3, num_ids=50)
    weights = posterior(uniform_prior(1), torch.tensor([[-3.0, -4e5, 0.0]]))
    assert weights.tolist() == [[0.0, 0.0, 0.0]]
    torch.testing.assert_close(mixture_logprobs(experts, weights), experts[0].double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_experts", [5])
def test_probabilities_sum_to_one(num_experts):
    experts = some_experts(num_experts, rows=4, num_ids=1000)
    generator = torch.Generator().manual_seed(1)
    weights = posterior(uniform_prior(num_experts), -20 * torch.rand(num_experts, 4, generator=generator))
    torch.testing.assert_close(weights.exp().sum(dim=0), torch.ones(4).double())
    total = mixture_logprobs(experts, weights).exp().sum(dim=-1)
    torch.testing.assert_close(total, torch.ones(4).double(), rtol=0, atol=1e-5)


def test_impossible_texts_and_tokens_give_no_nan():
    """A log-prob of -inf is a probability of 0, for an expert, a token, a prior, or all of them."""
    assert posterior(uniform_prior(2), torch.tensor([IMPOSSIBLE, -5.0])).tolist() == [IMPOSSIBLE, 0.0]
    all_impossible = posterior(logs([0.25, 0.75]), torch.tensor([IMPOSSIBLE, IMPOSSIBLE]))
    torch.testing.assert_close(all_impossible, logs([0.25, 0.75]))
    excluded = posterior(logs([0.0, 1.0]), torch.tensor([-1.0, -500.0]))
    assert excluded.tolist() == [IMPOSSIBLE, 0.0]
    excluded_or_impossible = posterior(logs([0.0, 1.0]), torch.tensor([-1.0, IMPOSSIBLE]))
    assert excluded_or_impossible.tolist() == [IMPOSSIBLE, 0.0]
    mixed = mixture_logprobs(logs([[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]]), logs([1.0, 0.0]))
    torch.testing.assert_close(mixed, logs([0.5, 0.5, 0.0]))


def test_a_difference_of_one_nat_counts_in_a_very_long_text():
    """The text has a million tokens of -10 nats each."""
    weights = posterior(uniform_prior(2), torch.tensor([-1e7, -1e7 - 1.0], dtype=torch.float64))
    torch.testing.assert_close(weights.exp(), torch.tensor([1.0, math.exp(-1.0)]).double() / (1 + math.exp(-1.0)))
