"""Every method on batches small enough to compute by hand. Values are maximized: minus the loss."""

import math
from typing import Any

import pytest
import torch

from ftis_node.algorithms.methods import METHODS

from .by_hand import evaluate, padded_logs, rows

# Two tokens with rho 2 and 1, and one token with rho 1/2.
LEARNER = [[0.5, 0.2], [0.1]]
BEHAVIOUR = [[0.25, 0.2], [0.2]]


def test_nois_ignores_the_ratios():
    value, gradient, _ = evaluate("nois", rows(LEARNER, BEHAVIOUR, [1.0, -3.0]))
    assert value == pytest.approx((1.0 - 3.0) / 2)
    assert gradient == [[0.25, 0.25], [-1.5, 0.0]]


def test_vis_clips_the_ratio_and_its_gradient():
    # Row 0: min(2, 1.2) and 1. Row 1, A < 0: min(-0.5 * 3, -0.8 * 3) is the clipped term.
    value, gradient, _ = evaluate("vis", rows(LEARNER, BEHAVIOUR, [1.0, -3.0]))
    assert value == pytest.approx(((1.2 + 1.0) / 2 - 2.4) / 2)
    assert gradient[0] == pytest.approx([0.0, 0.25]) and gradient[1] == [0.0, 0.0]


def test_tis_truncates_a_ratio_of_ten_to_two():
    value, gradient, metrics = evaluate("tis", rows([[0.5, 0.2]], [[0.05, 0.4]], [1.0]))
    assert value == pytest.approx((2.0 + 0.5) / 2)
    assert gradient[0] == pytest.approx([1.0, 0.25])
    assert metrics["truncated_fraction"] == 0.5


def test_ftis_drops_the_far_negative_and_keeps_the_far_positive():
    # k1_fwd of rows 0 and 1: log(0.5 / 0.05) = 2.3 > 1.
    batch = rows([[0.05], [0.05], [0.5]], [[0.5], [0.5], [0.5]], [-1.0, 2.0, -4.0])
    value, gradient, metrics = evaluate("ftis", batch, kl_estimator="k1_fwd", kl_threshold=1.0)
    assert value == pytest.approx((0.1 * 2.0 - 4.0) / 3) and gradient[0] == [0.0]
    assert gradient[1][0] == pytest.approx(0.1 * 2.0 / 3)
    assert metrics["kept_fraction"] == pytest.approx(2 / 3)
    assert metrics["mean_kl"] == pytest.approx(2 * math.log(10) / 3)


def test_denominator_kept_counts_only_kept_completions():
    batch = rows([[0.05, 0.05], [0.5]], [[0.5, 0.5], [0.5]], [-1.0, 1.0])
    limits = {"kl_estimator": "k1_fwd", "kl_threshold": 1.0, "max_completion_length": 10}
    for agg, of_all, of_kept in [("seq_mean", 2, 1), ("token_mean", 3, 1), ("max_len", 20, 10)]:
        assert evaluate("ftis", batch, agg=agg, **limits)[0] == pytest.approx(1 / of_all)
        assert evaluate("ftis", batch, agg=agg, denominator="kept", **limits)[0] == pytest.approx(1 / of_kept)


def test_the_default_filter_is_author_k3_at_50():
    # 1/rho + log rho - 1 is 95.4 at rho = 1/100 and 46.1 at rho = 1/50.
    batch = rows([[0.005], [0.01]], [[0.5], [0.5]], [-1.0, -1.0])
    for method in ("ftis", "f-nois", "f-vis"):
        assert evaluate(method, batch)[2]["kept_fraction"] == 0.5
    for method in ("tis", "nois", "vis"):
        assert evaluate(method, batch)[2]["kept_fraction"] == 1.0


def test_dr_grpo_divides_by_the_configured_length():
    value, _, _ = evaluate(
        "dr_grpo", rows([[0.5, 0.2], [0.1]], [[0.5, 0.2], [0.1]], [1.0, 3.0]), max_completion_length=5
    )
    assert value == pytest.approx((1 + 1 + 3) / (2 * 5))


def test_dapo_counts_every_token_the_same():
    value, gradient, _ = evaluate("dapo", rows([[0.5, 0.2], [0.1]], [[0.5, 0.2], [0.1]], [1.0, 3.0]))
    assert value == pytest.approx((1 + 1 + 3) / 3)
    assert gradient[0] == pytest.approx([1 / 3, 1 / 3])


def test_gspo_takes_the_geometric_mean_of_the_ratios():
    # s = sqrt(2 * 1), which eps_high = 1 does not clip.
    value, gradient, _ = evaluate("gspo", rows(LEARNER, BEHAVIOUR, [1.0, 2.0]), eps_high=1.0)
    assert value == pytest.approx((2**0.5 + 0.5 * 2.0) / 2)
    assert gradient[0] == pytest.approx([2**0.5 / 4] * 2)
    assert gradient[1][0] == pytest.approx(0.5)


def test_gepo_divides_by_the_groups_expected_probability():
    # Group 0: q = 0.2 and 0.4, E_q = (0.04 + 0.16) / 0.6 = 1/3. Group 1 is alone: E_q = q = 0.5.
    batch = rows([[0.3], [0.5], [0.1]], [[0.2], [0.5], [0.4]], [1.0, 1.0, 1.0], group_ids=[0, 1, 0])
    value, gradient, _ = evaluate("gepo", batch, clip=False)
    assert value == pytest.approx((0.9 + 1.0 + 0.3) / 3)
    assert [row[0] for row in gradient] == pytest.approx([0.3, 1 / 3, 0.1])


def test_topr_weights_negatives_only():
    batch = rows([[0.5, 0.1], [0.5, 0.1]], [[0.25, 0.4], [0.25, 0.4]], [1.0, -1.0])
    logs = math.log(0.5) + math.log(0.1)
    # Ratios 2 and 1/4: geometric mean sqrt(1/2), product 1/2, by token 1 and 1/4.
    for level, weight in [("seq_mean", 0.5**0.5), ("seq_sum", 0.5)]:
        value, gradient, _ = evaluate("topr", batch, topr_level=level)
        assert value == pytest.approx((logs - weight * logs) / 4)
        assert gradient[0] == pytest.approx([0.25, 0.25])
        assert gradient[1] == pytest.approx([-weight / 4, -weight / 4])
    assert evaluate("topr", batch, topr_level="token")[1][1] == pytest.approx([-0.25, -0.0625])


def test_cispo_caps_at_five_and_keeps_every_gradient():
    value, gradient, metrics = evaluate("cispo", rows([[0.5, 0.1]], [[0.05, 0.4]], [-2.0]))
    assert value == pytest.approx((-2 * 5 * math.log(0.5) - 2 * 0.25 * math.log(0.1)) / 2)
    assert gradient[0] == pytest.approx([-5.0, -0.25])
    assert metrics["truncated_fraction"] == 0.5


def test_mis_gives_no_weight_outside_its_band():
    # rho = 1/4, 0.75, 1.5 and 4.
    batch = rows([[0.1, 0.3, 0.3, 0.4]], [[0.4, 0.4, 0.2, 0.1]], [1.0])
    value, gradient, _ = evaluate("mis", batch)
    assert value == pytest.approx((0.75 + 1.5) / 4)
    assert gradient[0] == pytest.approx([0.0, 0.75 / 4, 1.5 / 4, 0.0])
    assert evaluate("mis", batch, mis_low=0.0, mis_high=1.0)[1][0] == pytest.approx([0.25 / 4, 0.75 / 4, 0.0, 0.0])


def test_m2po_drops_outliers_until_the_second_moment_is_below_the_threshold():
    # Squared log-ratios: log(2)^2 = 0.48, 0, log(0.9)^2 = 0.011. Without the first their mean is 0.0056 < 0.04.
    batch = rows([[0.5, 0.2], [0.18]], [[0.25, 0.2], [0.2]], [1.0, 1.0])
    value, gradient, _ = evaluate("m2po", batch)
    assert value == pytest.approx((1.0 + 0.9) / 3)  # all three tokens are counted
    assert gradient[0] == pytest.approx([0.0, 1 / 3])
    assert evaluate("m2po", batch, m2_threshold=1.0)[0] == pytest.approx((2.0 + 1.0 + 0.9) / 3)


MOVE = 0.10  # nats
WIDE: dict[str, dict[str, Any]] = {
    "dr_grpo": {"max_completion_length": 1}, "gspo": {"eps_low": 1.0, "eps_high": 1.0},
    "gspo_token": {"eps_low": 1.0, "eps_high": 1.0}, "accepted": {"sender_ids": torch.zeros(1, dtype=torch.int64)},
    "hacpo": {"eps_low": 1.0, "eps_high": 1.0, "sender_ids": torch.zeros(1, dtype=torch.int64)},
}  # fmt: skip


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("method", METHODS)
def test_an_own_token_that_moved_counts_its_move_once(method, advantage):
    """The generator is the learner at the first pass. Squared, a move by 0.10 would give a factor of 1.221."""
    batch = rows([[0.5 * math.exp(MOVE)]], [[0.5]], [advantage])
    variants = [{}, {"alpha": 0.5}, {"alpha": 1.0}] if method == "gepo" else [{}]
    for params in variants:
        params = WIDE.get(method, {}) | params
        _, gradient, _ = evaluate(method, batch, first_pass_logprobs=padded_logs([[0.5]]), **params)
        # `topr` gives a positive no weight, and a negative one of at most 1.
        factor = 1.0 if method == "topr" else 1.105171
        if method == "soft_adaptive":
            gate = 1 / (1 + math.exp(-(1.0 if advantage > 0 else 1.05) * (factor - 1)))
            factor *= 4 * gate * (1 - gate)  # within 0.3 % of 1
        assert gradient[0][0] == pytest.approx(factor * advantage, rel=1e-6), params


@pytest.mark.parametrize("method", ["nois", "tis", "ftis", "f-nois", "mis", "swarm_sapo"])
def test_the_clip_bounds_the_change_since_the_first_pass(method):
    # Own tokens that moved from 0.2 to 0.3: rho0 = 1, R = 1.5, beyond any clip.
    batch = rows([[0.3], [0.3]], [[0.2], [0.2]], [1.0, -1.0])
    value, gradient, _ = evaluate(method, batch, first_pass_logprobs=padded_logs([[0.2], [0.2]]))
    bound = 1.28 if method == "swarm_sapo" else 1.2
    assert value == pytest.approx((bound - 1.5) / 2) and gradient[0] == [0.0]
    assert gradient[1][0] == pytest.approx(-1.5 / 2)


def test_the_first_pass_has_two_names():
    batch, first = rows([[0.3]], [[0.2]], [1.0]), padded_logs([[0.25]])
    assert evaluate("tis", batch, anchor_logprobs=first) == evaluate("tis", batch, first_pass_logprobs=first)
    assert evaluate("tis", batch, anchor_logprobs=first) != evaluate("tis", batch)
