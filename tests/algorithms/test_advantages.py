"""`group_advantages` and `kl_to_start` against values computed by hand, and in numerically hard cases."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.algorithms.advantages import SCALES, group_advantages
from ftis_node.algorithms.loss import kl_to_start

from .reference_advantages import reference_advantages


def test_std_by_hand():
    # Mean 1, unbiased variance (1 + 0 + 1) / 2 = 1.
    advantages = group_advantages(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([7, 7, 7]))
    assert advantages.tolist() == pytest.approx([-1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("rewards", "ids", "how", "expected"),
    [
        ([1.0, 10.0, 0.0, 30.0, 0.5], [5, -2, 5, -2, 5], {"scale": "mean"}, [0.5, -10.0, -0.5, 10.0, 0.0]),
        ([0.0, 1.0, 2.0], [0, 0, 0], {"eps": 1.0}, [-0.5, 0.0, 0.5]),
        ([0.0, 1.0, 2.0], [0, 0, 0], {"eps": 0.0}, [-1.0, 0.0, 1.0]),
        ([1.0, 0.0, 0.0, 0.0], [0] * 4, {"scale": "success", "eps": 0.0}, [3.0, -1.0, -1.0, -1.0]),
    ],
    ids=["groups in any order", "eps is added to the deviation", "no eps", "a rare success weighs by its rate"],
)
def test_advantages_by_hand(rewards, ids, how, expected):
    assert group_advantages(torch.tensor(rewards).double(), torch.tensor(ids), **how).tolist() == expected


@pytest.mark.parametrize("scale", ["std", "mean"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3])
def test_equal_rewards_and_single_completions_have_zero_advantage(scale, reward):
    rewards = torch.full((13,), reward)
    ids = torch.tensor([1] * 12 + [2])
    for eps in (1e-8, 0.0):
        assert group_advantages(rewards, ids, scale, eps).tolist() == [0.0] * 13


def test_float32_is_kept_and_no_gradient_flows():
    rewards = torch.tensor([0.0, 1.0], requires_grad=True)
    advantages = group_advantages(rewards, torch.tensor([0, 0], dtype=torch.int32))
    assert advantages.dtype == torch.float32 and not advantages.requires_grad


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_completions=st.integers(1, 20),
    num_groups=st.integers(1, 6),
    scale=st.sampled_from(SCALES),
    shift=st.sampled_from((0.0, 0.1)),
    is_binary=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)
def test_against_the_reference(seed, num_completions, num_groups, scale, shift, is_binary, dtype):
    generator = random.Random(seed)
    names = [generator.randrange(-(2**40), 2**40) for _ in range(num_groups)]
    ids = [generator.choice(names) for _ in range(num_completions)]
    lowest = 0.0 if scale == "success" else -9.0
    drawn = [float(generator.random() < 0.5) if is_binary else max(lowest, generator.gauss(0, 3)) for _ in ids]
    senders = [generator.choice((0, 0, 5, -8)) for _ in ids]
    rewards = torch.tensor(drawn, dtype=dtype)
    advantages = group_advantages(rewards, torch.tensor(ids), scale, sender_ids=torch.tensor(senders), shift=shift)
    expected = reference_advantages(rewards.double().tolist(), ids, scale, 1e-8, senders, shift)
    digits = 1e-9 if dtype == torch.float64 else 1e-6
    assert advantages.tolist() == pytest.approx(expected, rel=digits, abs=digits / 1000)


def test_a_shift_moves_only_the_completions_of_peers_with_a_signal():
    rewards, ids = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 0.0]).double(), torch.tensor([1, 1, 2, 2, 3, 3])
    senders = torch.tensor([0, 0, 4, 4, 4, 4])
    advantages = group_advantages(rewards, ids, scale="mean", sender_ids=senders, shift=0.25)
    assert advantages.tolist() == [0.5, -0.5, 0.75, -0.25, 0.0, 0.0]


def test_a_shift_raises_no_completion_above_0_that_is_not_above_the_mean():
    """One of 16 peers' answers is right, so the mean 0.0625 is below the shift."""
    rewards, ids = torch.eye(16, dtype=torch.float64)[0], torch.zeros(16, dtype=torch.int64)
    for scale in SCALES:
        advantages = group_advantages(rewards, ids, scale=scale, sender_ids=torch.full_like(ids, 4), shift=0.1)
        assert advantages[0] > 0 and advantages[1:].tolist() == [0.0] * 15, scale


@pytest.mark.parametrize(
    ("scale", "shift", "rewards", "expected"),
    [
        ("capability", 0.0, [0.5] * 7 + [0.51], [2 * math.sqrt(8)] * 8),
        ("std", 0.1, [1.0, 1.0, 1.0, 1 - 1e-6], [2.0, 2.0, 2.0, 0.0]),
        ("std", 0.1, [0.01] + [0.0] * 7, [math.sqrt(8)] + [0.0] * 7),
        ("success", 0.1, [0.0, 1e-9, 0.0, 0.0], [0.0, 4.0, 0.0, 0.0]),
    ],
)
def test_nearly_equal_rewards_of_peers_have_bounded_advantages(scale, shift, rewards, expected):
    """A quotient by their deviation or mean would be 30 to 1e8. With `capability` omega is 1/2 and the baseline 1/4."""
    ids, senders = torch.tensor([0, 0] + [1] * len(rewards)), torch.tensor([0, 0] + [5] * len(rewards))
    exact = torch.tensor([1.0, 0.0, *rewards], dtype=torch.float64)
    advantages = group_advantages(exact, ids, scale=scale, sender_ids=senders, shift=shift)
    assert advantages[2:].tolist() == pytest.approx(expected)


def test_hacpo_scales_baseline_and_advantage_by_the_capabilities():
    """The node is right in half of its completions, the weaker peer 5 in a quarter, the stronger peer 6 in all but one.

    Group 2: omega 2, baseline 2 x 1/4 = 1/2, deviation 1/2, A = (1 - 1/2) / (1/2) / 2 and -(1/2) / (1/2) / 2.
    """
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 0.0]).double()
    ids, senders = torch.tensor([1, 1, 2, 2, 2, 2]), torch.tensor([0, 0, 5, 5, 5, 5])
    advantages = group_advantages(rewards, ids, "capability", 0.0, sender_ids=senders)
    root = math.sqrt(2)
    assert advantages.tolist() == pytest.approx([1 / root, -1 / root, 0.5, -0.5, -0.5, -0.5])


def test_hacpo_of_own_completions_alone_is_the_usual_advantage():
    rewards, ids = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0]), torch.tensor([1, 1, 2, 2, 2])
    assert torch.equal(group_advantages(rewards, ids, "capability"), group_advantages(rewards, ids))


VALID = (torch.tensor([0.0, 1.0]), torch.tensor([0, 0]))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((torch.tensor([[0.0, 1.0]]), VALID[1]), "rewards"), ((torch.tensor([0, 1]), VALID[1]), "rewards"),
        (([0.0, 1.0], VALID[1]), "rewards"), ((torch.tensor([0.0, float("nan")]), VALID[1]), r"rewards .* \[1\]"),
        ((VALID[0], torch.tensor([0])), "group_ids"), ((VALID[0], torch.tensor([0.0, 0.0])), "group_ids"),
        ((*VALID, "variance"), "scale .* std, mean, success, capability"),
        ((-VALID[0], VALID[1], "success"), "must be >= 0"), ((*VALID, "std", -1.0), "eps"),
        ((*VALID, "std", float("nan")), "eps"),
    ],
)  # fmt: skip
def test_an_invalid_argument_is_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        group_advantages(*arguments)


MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
LEARNER = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, math.nan, 9.0], [math.inf, 0.0, 0.0]], dtype=torch.float64)
REFERENCE = torch.tensor([[-1.5, -2.0, -0.1], [-1.0, 0.0, math.nan], [0.0, 0.0, 0.0]], dtype=torch.float64)
DIFFERENCES = {(0, 0): -0.5, (0, 1): 0.0, (0, 2): 0.4, (1, 0): 2.0}  # reference minus learner, at tokens
WEIGHTS = {
    "seq_mean": {(0, 0): 1 / 9, (0, 1): 1 / 9, (0, 2): 1 / 9, (1, 0): 1 / 3},
    "token_mean": dict.fromkeys(DIFFERENCES, 1 / 4), "max_len": dict.fromkeys(DIFFERENCES, 1 / 30),
}  # fmt: skip


RATIOS = {(0, 0): 1.5, (0, 1): 0.2, (0, 2): 1.0, (1, 0): 7.0}  # rho at tokens


@pytest.mark.parametrize("cap", [None, 2.0, 9.0])
@pytest.mark.parametrize("agg", sorted(WEIGHTS))
def test_value_and_gradient_by_hand(agg, cap):
    """With rho the gradient is that of the KL, rho (lp - lp_start): the product rule removes all other terms."""
    learner, behaviour = LEARNER.clone().requires_grad_(), torch.full_like(LEARNER, math.nan)
    for cell, ratio in RATIOS.items():
        behaviour[cell] = LEARNER[cell] - math.log(ratio)
    of_generator = {} if cap is None else {"behaviour_logprobs": behaviour, "cap": cap}
    value = kl_to_start(learner, REFERENCE, MASK, agg=agg, max_completion_length=10, **of_generator)
    (gradient,) = torch.autograd.grad(value, learner)
    weights, ratios = WEIGHTS[agg], {cell: 1.0 if cap is None else min(cap, RATIOS[cell]) for cell in RATIOS}
    expected = sum(weights[cell] * ratios[cell] * (math.exp(d) - d - 1) for cell, d in DIFFERENCES.items())
    assert value.item() == pytest.approx(expected, rel=1e-12)
    by_hand = torch.zeros(3, 3, dtype=torch.float64)
    for cell, difference in DIFFERENCES.items():
        by_hand[cell] = weights[cell] * (1 - math.exp(difference) if cap is None else -ratios[cell] * difference)
    torch.testing.assert_close(gradient, by_hand, rtol=1e-12, atol=0)


@pytest.mark.parametrize("agg", sorted(WEIGHTS))
def test_the_kl_of_a_batch_is_the_sum_over_its_tokens(agg):
    """So a step may divide a batch. The other tokens have no difference here."""
    whole = kl_to_start(LEARNER, REFERENCE, MASK, agg=agg, max_completion_length=10)
    alone = []
    for cell in DIFFERENCES:
        learner = REFERENCE.clone()
        learner[cell] = LEARNER[cell]
        alone.append(kl_to_start(learner, REFERENCE, MASK, agg=agg, max_completion_length=10))
    assert sum(alone).item() == pytest.approx(whole.item(), rel=1e-12)


def test_a_tiny_difference_is_squared_and_a_huge_one_is_finite():
    """A tiny difference gives half its square. A huge one gives a finite value and a gradient towards the start."""
    one = torch.ones(1, 1, dtype=torch.bool)
    tiny = kl_to_start(torch.tensor([[-1.0]]).double(), torch.tensor([[-1.0 + 1e-6]]).double(), one, agg="seq_mean")
    assert tiny.item() == pytest.approx(5e-13, rel=1e-3)
    learner = torch.tensor([[-500.0]], requires_grad=True)
    far = kl_to_start(learner, torch.tensor([[-0.1]]), one, agg="seq_mean")
    (gradient,) = torch.autograd.grad(far, learner)
    assert math.isfinite(far.item()) and gradient.item() == pytest.approx(1 - math.exp(20))
