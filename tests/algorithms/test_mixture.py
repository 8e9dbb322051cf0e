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

The text: 3/8 * 5/12 = 15/96 = 5/32, which is 1/2 * 1/4 + 1/2 * 1/16.
"""

import math

import pytest
import torch
from torch import Tensor

from ftis_node.algorithms.mixture import mixture_logprobs, posterior, text_logprobs

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


def test_a_text_by_hand():
    tokens = logs([[1 / 2, 1 / 2], [1 / 4, 1 / 4]])
    torch.testing.assert_close(text_logprobs(tokens, uniform_prior(2)), logs([3 / 8, 5 / 12]))
    torch.testing.assert_close(text_logprobs(tokens, uniform_prior(2)).sum(), torch.tensor(5 / 32).double().log())
    torch.testing.assert_close(text_logprobs(tokens, uniform_prior(2), learns=False), logs([3 / 8, 3 / 8]))


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
    impossible = text_logprobs(torch.tensor([[-1.0, IMPOSSIBLE, -1.0], [-1.0, IMPOSSIBLE, -1.0]]), uniform_prior(2))
    assert impossible.tolist() == [-1.0, IMPOSSIBLE, -1.0]


def test_a_difference_of_one_nat_counts_in_a_very_long_text():
    """The text has a million tokens of -10 nats each."""
    weights = posterior(uniform_prior(2), torch.tensor([-1e7, -1e7 - 1.0], dtype=torch.float64))
    torch.testing.assert_close(weights.exp(), torch.tensor([1.0, math.exp(-1.0)]).double() / (1 + math.exp(-1.0)))
    tokens = torch.full((2, 2000), -10.0)
    tokens[1, -1] = -11.0
    total = text_logprobs(tokens, uniform_prior(2)).sum()
    by_chain_rule = torch.logsumexp(uniform_prior(2) + tokens.double().sum(dim=1), dim=0)
    torch.testing.assert_close(total, by_chain_rule, rtol=1e-12, atol=1e-6)
