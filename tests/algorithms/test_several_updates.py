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
}
FILTERED = pytest.mark.parametrize("method", ["ftis", "f-nois", "f-vis"])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("method", METHODS)
def test_an_own_token_that_moved_counts_its_move_once(method: str, advantage: float) -> None:
    """The generator is the learner at the first pass. Squared, a move by 0.10 would give a factor of 1.221."""
    batch = rows([[0.5 * math.exp(MOVE)]], [[0.5]], [advantage])
    variants = [{}, {"alpha": 0.5}, {"alpha": 1.0}] if method == "gepo" else [{}]
    for params in variants:
        params = WIDE.get(method, {}) | params
        _, gradient, _ = evaluate(method, batch, first_pass_logprobs=padded_logs([[0.5]]), **params)
        # `topr` gives a positive no weight, and a negative one of at most 1.
        factor = 1.0 if method == "topr" else 1.105171
        assert gradient[0][0] == pytest.approx(factor * advantage, rel=1e-6), params


@pytest.mark.parametrize("method", ["tis", "ftis"])
def test_a_truncated_weight_is_that_of_the_first_pass(method: str) -> None:
    # rho0 is 1.8 and 4, R is 1.1 and 0.9: weights 1.8 (rho = 1.98) and 2.
    batch = rows([[0.495, 0.36]], [[0.25, 0.1]], [1.0])
    first_pass = padded_logs([[0.45, 0.4]])
    value, gradient, metrics = evaluate(method, batch, first_pass_logprobs=first_pass)
    assert gradient[0] == pytest.approx([1.8 * 1.1 / 2, 2.0 * 0.9 / 2])
    assert value == pytest.approx(sum(gradient[0]))
    assert metrics["truncated_fraction"] == 0.5
    # A token that exceeds the cap only since the first pass keeps its weight.
    batch = rows([[0.525]], [[0.25]], [-1.0])
    _, gradient, metrics = evaluate(method, batch, first_pass_logprobs=padded_logs([[0.45]]))
    assert gradient[0][0] == pytest.approx(-1.8 * 0.525 / 0.45)
    assert metrics["truncated_fraction"] == 0.0


def test_a_floor_raises_the_weight_of_the_first_pass() -> None:
    batch = rows([[0.055]], [[0.5]], [1.0])
    assert evaluate("ftis", batch, floor=0.25, first_pass_logprobs=padded_logs([[0.05]]))[1][0][0] == pytest.approx(
        0.25 * 1.1
    )


def test_the_band_of_mis_is_that_of_the_first_pass() -> None:
    # rho0 is 1.9, 2.1, 0.55 and 0.45; rho is 2.09, 1.89, 0.495 and 0.54.
    batch = rows([[0.209, 0.189, 0.0495, 0.054]], [[0.1] * 4], [1.0])
    _, gradient, _ = evaluate("mis", batch, first_pass_logprobs=padded_logs([[0.19, 0.21, 0.055, 0.045]]))
    assert gradient[0] == pytest.approx([1.9 * 1.1 / 4, 0.0, 0.55 * 0.9 / 4, 0.0])


@pytest.mark.parametrize("method", ["nois", "tis", "ftis", "f-nois", "mis", "swarm_sapo"])
def test_the_clip_bounds_the_change_since_the_first_pass(method: str) -> None:
    # Own tokens that moved from 0.2 to 0.3: rho0 = 1, R = 1.5, beyond any clip.
    batch = rows([[0.3], [0.3]], [[0.2], [0.2]], [1.0, -1.0])
    value, gradient, _ = evaluate(method, batch, first_pass_logprobs=padded_logs([[0.2], [0.2]]))
    bound = 1.28 if method == "swarm_sapo" else 1.2
    assert value == pytest.approx((bound - 1.5) / 2)
    assert gradient[0] == [0.0]
    assert gradient[1][0] == pytest.approx(-1.5 / 2)


@FILTERED
@pytest.mark.parametrize("params", [{}, {"filter": "quantile", "keep_share": 0.5}, {"filter": "ess"}])
def test_all_updates_keep_the_completions_of_the_first(method: str, params: dict[str, Any]) -> None:
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


@pytest.mark.parametrize(
    "method", ["vis", "grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "topr", "cispo", "m2po", "gepo"]
)
def test_methods_without_r_have_the_ratio_of_the_current_pass(method: str) -> None:
    batch = rows([[0.5, 0.2], [0.1, 0.3]], [[0.45, 0.2], [0.12, 0.4]], [1.0, -3.0])
    limit = {"max_completion_length": 2} if method == "dr_grpo" else {}
    first_pass = padded_logs([[0.1, 0.9], [0.7, 0.01]])
    assert evaluate(method, batch, first_pass_logprobs=first_pass, **limit)[:2] == evaluate(method, batch, **limit)[:2]


def test_the_mask_of_m2po_bounds_the_current_pass() -> None:
    """The squared move, log(1.5)^2 = 0.16, is above tau = 0.04: the token has no gradient, as with PPO's clip."""
    batch = rows([[0.3]], [[0.2]], [1.0])
    assert evaluate("m2po", batch, first_pass_logprobs=padded_logs([[0.2]]))[1] == [[0.0]]


def test_the_denominator_of_gepo_is_that_of_the_first_pass() -> None:
    # E_q = q = 0.2, p0 = 0.4, p = 0.44: the denominator is 0.3.
    batch = rows([[0.44]], [[0.2]], [1.0])
    first_pass = padded_logs([[0.4]])
    value, gradient, _ = evaluate("gepo", batch, clip=False, alpha=0.5, first_pass_logprobs=first_pass)
    assert value == gradient[0][0] == pytest.approx(0.44 / 0.3)
    assert evaluate("gepo", batch, alpha=1.0, first_pass_logprobs=padded_logs([[0.2]]))[1] == [[0.0]], "R = 2.2 is cut"


@pytest.mark.parametrize("method", METHODS)
def test_one_update_equals_a_first_pass_at_the_current_log_probs(method: str) -> None:
    batch = rows([[0.5, 0.2], [0.1], [0.3, 0.4]], [[0.25, 0.2], [0.2], [0.4, 0.1]], [1.0, -3.0, 0.5])
    limit = {"max_completion_length": 2} if method == "dr_grpo" else {}
    current = batch["learner_logprobs"].detach().clone()
    assert evaluate(method, batch, first_pass_logprobs=current, **limit) == evaluate(method, batch, **limit)


def test_the_first_pass_has_no_gradient() -> None:
    first_pass = torch.tensor([[-0.7]], dtype=torch.float64, requires_grad=True)
    for method in ("ftis", "gepo"):
        evaluate(method, rows([[0.5]], [[0.4]], [1.0]), first_pass_logprobs=first_pass)
    assert first_pass.grad is None
