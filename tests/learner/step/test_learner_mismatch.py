"""The training-inference mismatch: figures by hand, and the groups on which it is measured."""

import math

import pytest
import torch
from learner_rig import PROMPT, make_boot, make_group, one_by_one_logprobs

from ftis_node.learner.learner import Learner
from ftis_node.learner.train_report import measure_mismatch

COMPLETIONS = [[1, 2, 3], [4, 5]]
REWARDS = [1.0, 0.0]


def test_a_mismatch_by_hand():
    engine = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    learner = engine + torch.tensor([0.0, math.log(2), -math.log(2), 0.005])
    found = measure_mismatch(learner, engine)
    # (r - 1) - log r of the ratios 1, 2, 1/2 and 1.005: 0, 1 - 0.693147, -0.5 + 0.693147 and 0.0000125
    assert found.kl == pytest.approx((0.306853 + 0.193147 + 0.0000125) / 4, abs=1e-6)
    assert (found.share, found.num_tokens) == (0.5, 4)


def test_a_ratio_off_by_more_than_one_percent_counts_either_way():
    ratios = torch.tensor([1.0101, 1.0099, 0.9899, 0.9901], dtype=torch.float64)
    assert measure_mismatch(ratios.log(), torch.zeros(4)).share == 0.5


def test_no_tokens_have_no_figure_and_a_huge_ratio_does_not_overflow():
    assert measure_mismatch(torch.zeros(0), torch.zeros(0)) is None
    assert measure_mismatch(torch.tensor([math.nan]), torch.zeros(1)) is None
    assert measure_mismatch(torch.zeros(1), torch.tensor([-1e30])).kl == pytest.approx(math.expm1(20) - 20)


@torch.no_grad()
def own_group(learner, *, shift=0.0, shifted=2, **more):
    """Return a group with log-probs of the current weights, minus `shift` nats in the first `shifted` completions."""
    exact = [one_by_one_logprobs(learner.policy.causal_lm, PROMPT, ids).tolist() for ids in COMPLETIONS]
    logprobs = [[value - shift * (row < shifted) for value in values] for row, values in enumerate(exact)]
    return make_group(COMPLETIONS, REWARDS, logprobs=logprobs, **more)


def old_groups():
    """Return a batch with a signal, without groups of the current version."""
    return [make_group(COMPLETIONS, REWARDS, number=9, version=77)]


def figures(report):
    return report.mismatch_kl, report.mismatch_share, report.mismatch_tokens, report.mismatch_version


def kl_of(shift):
    """Return the KL of tokens whose log-prob is `shift` nats higher in the learner than in the engine."""
    return math.expm1(shift) - shift


def test_own_groups_of_the_current_version_are_measured(model_folder, tmp_path):
    learner = Learner(make_boot(model_folder, tmp_path))
    kl, *others = figures(learner.train([own_group(learner)], step=1).report)
    assert abs(kl) < 1e-10
    assert others == [0.0, 5, 0]
    groups = [
        own_group(learner, version=1, shift=0.1, shifted=1, number=0),  # 3 of 5 tokens
        own_group(learner, version=0, shift=3.0, number=1),
        own_group(learner, version=0, newest=1, shift=3.0, number=2),
        own_group(learner, version=1, newest=2, shift=3.0, number=3),
        own_group(learner, version=1, own=False, shift=3.0, number=4),
    ]
    kl, *others = figures(learner.train(groups, step=2).report)
    assert kl == pytest.approx(0.6 * kl_of(0.1), rel=1e-3)
    assert others == [0.6, 5, 1]


def test_a_check_group_is_measured_with_the_weights_before_the_update(model_folder, tmp_path):
    learner = Learner(make_boot(model_folder, tmp_path, learning_rate=1e-1))
    assert figures(learner.train(old_groups(), step=1).report) == (None, None, 0, None)
    learner.offer_check(own_group(learner, version=1, shift=2.0))
    learner.offer_check(own_group(learner, version=1, shift=0.1))  # replaces the earlier one
    kl, *others = figures(learner.train(old_groups(), step=2).report)
    assert kl == pytest.approx(kl_of(0.1), rel=1e-3)
    assert others == [1.0, 5, 1]
    assert figures(learner.train(old_groups(), step=3).report) == (None, None, 0, None), "the check group has version 1"


def test_a_check_group_of_other_weights_is_dropped(model_folder, tmp_path):
    learner = Learner(make_boot(model_folder, tmp_path))
    late = own_group(learner, version=0)
    learner.train(old_groups(), step=1)
    learner.offer_check(own_group(learner, version=1, shift=0.1))
    learner.check()
    for group in (late, own_group(learner, version=0, newest=1), own_group(learner, version=1, newest=2)):
        learner.offer_check(group)
        learner.check()
    learner.offer_check(late)
    assert figures(learner.train(old_groups(), step=2).report)[1:] == (1.0, 5, 1), "the measurement before them stays"
