"""Several updates on one batch: which part of each method is of the first pass, and which of the current one.

Values are maximized: minus the loss.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ftis_node.algorithms.methods import METHODS

from .by_hand import evaluate, padded_logs, rows

MOVE = 0.10  # nats
WIDE: dict[str, dict[str, Any]] = {
    "dr_grpo": {"max_completion_length": 1},
    "gspo": {"eps_low": 1.0, "eps_high": 1.0},
    "gspo_token": {"eps_low": 1.0, "eps_high": 1.0},
    "hacpo": {"eps_low": 1.0, "eps_high": 1.0, "sender_ids": torch.zeros(1, dtype=torch.int64)},
}


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
    assert value == pytest.approx((bound - 1.5) / 2)
    assert gradient[0] == [0.0]
    assert gradient[1][0] == pytest.approx(-1.5 / 2)


def test_the_first_pass_has_two_names():
    batch, first = rows([[0.3]], [[0.2]], [1.0]), padded_logs([[0.25]])
    assert evaluate("tis", batch, anchor_logprobs=first) == evaluate("tis", batch, first_pass_logprobs=first)
    assert evaluate("tis", batch, anchor_logprobs=first) != evaluate("tis", batch)


@pytest.mark.parametrize("params", [{}, {"filter": "quantile", "keep_share": 0.5}, {"filter": "ess"}])
def test_all_updates_keep_the_completions_of_the_first(params, method="ftis"):
    """The near negative of the first pass moves far away, and the far one comes near."""
    near, far = [0.49, 0.49], [0.05, 0.05]
    params = {"kl_estimator": "k1_fwd", "kl_threshold": 1.0} | params
    behaviour, advantages = [[0.5, 0.5]] * 2, [-1.0, -1.0]
    first = evaluate(method, rows([near, far], behaviour, advantages), **params)
    moved = rows([far, near], behaviour, advantages)
    later = evaluate(method, moved, first_pass_logprobs=padded_logs([near, far]), **params)
    assert later[2]["kept_fraction"] == first[2]["kept_fraction"] == 0.5
    assert later[2]["mean_kl"] == first[2]["mean_kl"]
    for _, gradient, _ in (first, later):
        assert gradient[1] == [0.0, 0.0]
    assert evaluate(method, moved, **params)[1][0] == [0.0, 0.0], "the current pass alone would keep the other one"


def test_the_denominator_of_gepo_is_that_of_the_first_pass():
    # E_q = q = 0.2, p0 = 0.4, p = 0.44: the denominator is 0.3.
    batch = rows([[0.44]], [[0.2]], [1.0])
    first_pass = padded_logs([[0.4]])
    value, gradient, _ = evaluate("gepo", batch, clip=False, alpha=0.5, first_pass_logprobs=first_pass)
    assert value == gradient[0][0] == pytest.approx(0.44 / 0.3)
    assert evaluate("gepo", batch, alpha=1.0, first_pass_logprobs=padded_logs([[0.2]]))[1] == [[0.0]], "R = 2.2 is cut"
