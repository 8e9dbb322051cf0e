"""KL estimators against exact enumeration, the completions that each filter keeps, and M2PO's mask."""

import math
from typing import Any

import pytest
import torch

from ftis_node.algorithms.batch import read_batch
from ftis_node.algorithms.filters import effective_share, keep_near_or_good, sequence_kl

from .by_hand import evaluate, padded_logs, rows

VOCABULARY = 7


def expectation(estimator: str, learner: torch.Tensor, behaviour: torch.Tensor) -> float:
    """Return E_gen of the estimator: the mean over one-token completions, weighted by the generator's probability."""
    total = 0.0
    for token in range(VOCABULARY):
        batch = rows([[learner[token].item()]], [[behaviour[token].item()]], [1.0])
        _, _, metrics = evaluate("nois", batch, kl_estimator=estimator)
        total += behaviour[token].item() * metrics["mean_kl"]
    return total


def kl_divergence(of: torch.Tensor, relative_to: torch.Tensor) -> float:
    return float((of * (of.log() - relative_to.log())).sum())


def test_estimators_by_exact_enumeration():
    """Learner and generator are softmaxes over a small vocabulary."""
    generator = torch.Generator().manual_seed(5)
    learner, behaviour = torch.softmax(torch.randn(2, VOCABULARY, generator=generator, dtype=torch.float64), dim=1)
    forward = kl_divergence(behaviour, learner)
    expected = {
        "author_k3": float((behaviour.square() / learner).sum()) - 1 - forward,  # chi-squared minus KL
        "k1_fwd": forward,
        "k3_fwd": forward,
        "rkl_iw": kl_divergence(learner, behaviour),
    }
    assert {name: expectation(name, learner, behaviour) for name in expected} == pytest.approx(expected, rel=1e-12)


def test_k3_of_nearly_equal_policies_is_accurate_in_float32():
    behaviour = torch.full((1, 4), -1.0)
    zero = torch.zeros(1)
    batch = read_batch(behaviour + torch.tensor(2**-10), behaviour, torch.ones(1, 4).bool(), zero, zero.long())
    assert sequence_kl(batch, "k3_fwd").item() == pytest.approx(2**-21, rel=1e-3)


def test_the_kl_filter_keeps_positives_and_near_completions():
    advantages = torch.tensor([1.0, 1.0, 0.0, 0.0, -1.0, -1.0, -1.0])
    kl = torch.tensor([9.0, 1.0, 9.0, 1.0, 9.0, 1.0, 5.0])
    assert keep_near_or_good(advantages, kl, 5.0).tolist() == [True, True, False, True, False, True, False]


def kept(learner: list[float], advantages: list[float], senders: list[int] | None = None, **params: Any) -> list[bool]:
    """Return which one-token completions, sampled with probability 0.5, have a gradient. A row of A = 0 has none."""
    batch = rows([[p] for p in learner], [[0.5]] * len(learner), advantages)
    ids = {} if senders is None else {"sender_ids": torch.tensor(senders)}
    _, gradient, metrics = evaluate("f-nois", batch, kl_estimator="k1_fwd", **params, **ids)
    has_gradient = [row[0] != 0.0 for row in gradient]
    num_neutral = sum(advantage == 0 for advantage in advantages)
    assert metrics["kept_fraction"] == pytest.approx((sum(has_gradient) + num_neutral) / len(learner))
    return has_gradient


QUANTILE = {"filter": "quantile", "keep_share": 0.5}


def test_quantile_keeps_the_nearest_negatives_of_each_sender():
    # Sender 7: the KL log(0.5/p) is in the order 0.4 < 0.3 < 0.2 < 0.1. Sender 8 is farther, and half of its are kept.
    learner = [0.1, 0.01, 0.4, 0.02, 0.3, 0.001, 0.2]
    senders = [7, 8, 7, 8, 7, 8, 7]
    advantages = [-1.0, -1.0, -1.0, -1.0, -1.0, 2.0, -1.0]
    assert kept(learner, advantages, senders, **QUANTILE) == [False, False, True, True, True, True, False]


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.12, 0), (0.125, 1), (0.6, 2), (1.0, 4)])
def test_the_number_kept_is_rounded_to_the_nearest(share, expected):
    flags = kept([0.4, 0.3, 0.2, 0.1], [-1.0] * 4, filter="quantile", keep_share=share)
    assert flags == [rank < expected for rank in range(4)]


def test_completions_of_equal_kl_are_kept_together():
    assert kept([0.4, 0.2, 0.2, 0.2], [-1.0] * 4, **QUANTILE) == [True, True, True, True]


@pytest.mark.parametrize("rule", ["quantile", "ess"])
def test_positives_and_own_completions_are_always_kept(rule):
    far = [1e-6] * 4
    assert kept(far, [1.0] * 4, [3] * 4, filter=rule, keep_share=0.0) == [True] * 4, "a sender with positives only"
    assert kept(far, [-1.0] * 4, [0] * 4, filter=rule, keep_share=0.0) == [True] * 4, "own completions only"
    assert kept(far, [-1.0] * 4, [3] * 4, filter=rule, keep_share=0.0) == [False] * 4
    assert kept(far, [-1.0] * 4, [0, 3, 0, 3], filter=rule, keep_share=0.0) == [True, False, True, False]


def test_rank_own_ranks_own_completions_like_those_of_a_peer():
    learner, senders = [0.1, 0.4, 0.001, 0.01, 1e-6], [0, 0, 3, 3, 0]
    advantages = [-1.0, -1.0, -1.0, -1.0, 1.0]
    assert kept(learner, advantages, senders, **QUANTILE) == [True, True, False, True, True]
    assert kept(learner, advantages, senders, **QUANTILE, rank_own=True) == [False, True, False, True, True]


@pytest.mark.parametrize("rule", ["quantile", "ess"])
def test_without_sender_ids_each_group_is_a_sender_and_none_is_own(rule):
    batch = rows([[0.4], [0.1], [0.02], [0.01]], [[0.5]] * 4, [-1.0] * 4, group_ids=[0, 0, 5, 5])
    of_groups = evaluate("ftis", batch, filter=rule, keep_share=0.5)
    assert of_groups == evaluate("ftis", batch, filter=rule, keep_share=0.5, sender_ids=torch.tensor([1, 1, 2, 2]))
    assert of_groups != evaluate("ftis", batch, filter=rule, keep_share=0.5, sender_ids=torch.tensor([0, 0, 2, 2]))


def shares(ratios: list[float], senders: list[int]) -> list[float]:
    """Return `effective_share` of completions of two tokens, both with the completion's ratio."""
    logs = padded_logs([[ratio / 8] * 2 for ratio in ratios])
    ids, size = torch.tensor(senders), len(ratios)
    batch = read_batch(logs, padded_logs([[1 / 8] * 2] * size), ~logs.isnan(), torch.zeros(size), ids, sender_ids=ids)
    return effective_share(batch).tolist()


def test_effective_share_by_hand():
    assert shares([1.0] * 5, [1] * 5) == [1.0], "the same model"
    assert shares([0.5] * 4, [1] * 4) == pytest.approx([0.5]), "equally unlikely: ESS is n, the mean weight 1/2"
    assert shares([1.0, 0.5], [1, 1]) == pytest.approx([1.5**2 / (2 * 1.25) * 0.75]), "near"
    assert shares([8.0, 0.5], [1, 1]) == pytest.approx([1.5**2 / (2 * 1.25) * 0.75]), "weights are capped at 1"
    one_of_four = shares([1.0, 1e-9, 1e-9, 1e-9], [1] * 4)
    assert one_of_four == pytest.approx([1 / 16]), "far but for one: ESS is 1 of 4, the mean weight 1/4"
    assert shares([1e-9] * 4, [1] * 4) == pytest.approx([1e-9]), "far"
    assert shares([1e-300] * 4, [1] * 4) == pytest.approx([math.exp(-80)]), "the square of the weight would be 0"
    assert shares([0.5, 1.0, 0.5, 1.0], [9, 4, 9, 4]) == pytest.approx([1.0, 0.5]), "the order is that of sender ids"


def test_ess_keeps_all_of_the_same_model_some_of_a_near_one_and_none_of_a_far_one():
    same, near, far = [0.5] * 4, [0.45, 0.35, 0.25, 0.15], [0.01] * 4
    flags = kept(same + near + far, [-1.0] * 12, [1] * 4 + [2] * 4 + [3] * 4, filter="ess")
    # ratios 0.9, 0.7, 0.5, 0.3: ESS/n = 2.4^2 / (4 * 1.64) = 0.878 and the mean is 0.6, so that 2.1 of 4 are kept
    assert flags == [True] * 4 + [True, True, False, False] + [False] * 4


def test_ess_counts_positives_and_negatives():
    # The near negative alone is kept. With two far positives of its sender it is dropped.
    assert kept([0.5], [-1.0], filter="ess") == [True]
    assert kept([0.5, 1e-6, 1e-6], [-1.0, 1.0, 1.0], filter="ess") == [False, True, True]
