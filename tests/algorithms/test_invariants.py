"""Properties of every method."""

import math
from typing import Any

import pytest
import torch

from ftis_node.algorithms import policy_loss
from ftis_node.algorithms.methods import METHODS

from .by_hand import evaluate, rows
from .cases import make_case

LIMITS: dict[str, dict[str, Any]] = {"dr_grpo": {"max_completion_length": 16}}
FILTERS = pytest.mark.parametrize("rule", ["quantile", "ess", "obrs", "positives"])


def run(
    method: str, tensors: dict[str, torch.Tensor], **params: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Return loss, gradient and metrics. The tensors keep their values and gradients."""
    learner = tensors["learner_logprobs"].detach().clone().requires_grad_()
    loss, metrics = policy_loss(
        method, **(tensors | {"learner_logprobs": learner}), **(LIMITS.get(method, {}) | params)
    )
    loss.backward()
    assert learner.grad is not None
    return loss.detach(), learner.grad, metrics


def test_methods_agree_if_learner_and_generator_are_equal():
    same = [[0.5, 0.2, 0.9], [0.1], [0.3, 0.3]]
    gradients = [evaluate(m, rows(same, same, [1.0, -2.0, 0.5]))[1] for m in ("nois", "vis", "tis", "ftis", "grpo")]
    assert gradients[0][0] == pytest.approx([1 / 9] * 3)
    assert all(gradient == gradients[0] for gradient in gradients)


def test_accepted_reads_no_log_prob_of_a_generator_and_is_nois_without_the_wrong_answers_of_others():
    tensors = make_case(5, 7, 6, "mixed").tensors(torch.float64)
    tensors["group_ids"] = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    tensors["sender_ids"] = 4 * tensors["group_ids"]
    tensors["advantages"] = torch.tensor([1.0, -2.0, 0.5, 0.7, -0.7, -0.1, 2.0], dtype=torch.float64)
    loss, gradient, metrics = run("accepted", tensors)
    others = tensors | {"behaviour_logprobs": torch.full_like(tensors["behaviour_logprobs"], -3.0)}
    assert torch.equal(run("accepted", others)[1], gradient)
    believed = tensors["advantages"].clone()
    believed[4:6] = 0.0
    without = {name: value for name, value in tensors.items() if name != "sender_ids"}
    expected = run("nois", without | {"advantages": believed})
    assert torch.equal(expected[0], loss) and torch.equal(expected[1], gradient)
    assert metrics["kept_fraction"] == pytest.approx(5 / 7)


@pytest.mark.parametrize("method", METHODS)
def test_no_intermediate_gradient_is_nan(method):
    """Anomaly detection raises on a NaN in any intermediate gradient, also if a mask removes it later."""
    for seed in range(2):
        tensors = make_case(seed, 6, 5, "beyond_clamp").tensors(torch.float64)
        tensors["mask"][:2] = False
        tensors["group_ids"] = torch.tensor([0, 0, 1, 1, 2, 2])  # group 0 has no tokens
        with torch.autograd.set_detect_anomaly(True):
            loss, gradient, _ = run(method, tensors)
        assert loss.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_an_empty_batch_has_a_zero_loss_with_a_gradient(method):
    no_tokens = make_case(1, 3, 4, "near").tensors(torch.float32)
    no_tokens["mask"] = torch.zeros(3, 4, dtype=torch.bool)
    no_columns = make_case(1, 3, 0, "near").tensors(torch.float32)
    no_rows = {name: value[:0] for name, value in no_tokens.items()}
    for tensors in (no_tokens, no_columns, no_rows):
        for denominator in ("all", "kept"):
            loss, gradient, metrics = run(method, tensors, denominator=denominator)
            assert loss.item() == 0.0 and not gradient.any()
            assert metrics["truncated_fraction"] == metrics["mean_kl"] == 0.0


@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("agg", ["seq_mean", "token_mean", "max_len"])
def test_a_batch_without_kept_completions_has_zero_loss_and_gradient(denominator, agg):
    batch = rows([[1e-4], [1e-4]], [[0.5], [0.5]], [-1.0, 0.0])
    value, gradient, metrics = evaluate(
        "ftis", batch, denominator=denominator, agg=agg, max_completion_length=4, kl_threshold=0.0
    )
    assert (value, gradient, metrics["kept_fraction"]) == (0.0, [[0.0], [0.0]], 0.0)


@pytest.mark.parametrize("method", METHODS)
def test_extreme_finite_log_probs_give_finite_results_in_float32(method):
    """One side finds a token certain, the other nearly impossible, in both directions and with both signs of A."""
    tensors = {
        "learner_logprobs": torch.tensor([[-1e-3], [-1e4], [-1e-3], [-1e4]]),
        "behaviour_logprobs": torch.tensor([[-1e4], [-1e-3], [-1e4], [-1e-3]]),
        "mask": torch.ones(4, 1, dtype=torch.bool),
        "advantages": torch.tensor([1.0, 1.0, -1.0, -1.0]),
        "group_ids": torch.tensor([0, 0, 1, 1]),
    }
    for params in ({}, {"agg": "token_mean"}, {"clip": False, "k3_beta": 1.0} if method == "gepo" else {}):
        loss, gradient, metrics = run(method, tensors, **params)
        assert loss.isfinite() and gradient.isfinite().all()
        assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("method", METHODS)
def test_only_the_learner_log_probs_have_a_gradient(method):
    tensors = make_case(4, 4, 4, "near").tensors(torch.float64)
    others = {name: tensors[name].clone().requires_grad_() for name in ("behaviour_logprobs", "advantages")}
    copies = {name: value.detach().clone() for name, value in tensors.items()}
    loss, _ = policy_loss(
        method, **(tensors | others), **LIMITS.get(method, {}), first_pass_logprobs=others["behaviour_logprobs"]
    )
    loss.backward()
    assert all(tensor.grad is None for tensor in others.values())
    assert tensors["learner_logprobs"].grad is not None
    for name, copy in copies.items():
        torch.testing.assert_close(tensors[name].detach(), copy, rtol=0, atol=0, equal_nan=True)


@FILTERS
def test_sender_filters_accept_padding_empty_batches_and_extreme_log_probs(rule):
    tensors = make_case(3, 6, 8, "mixed").tensors(torch.float64)
    filled = {name: tensors[name].detach().clone() for name in ("learner_logprobs", "behaviour_logprobs")}
    for logprobs in filled.values():
        logprobs[~tensors["mask"]] = math.nan
    assert torch.equal(run("ftis", tensors | filled, filter=rule)[1], run("ftis", tensors, filter=rule)[1])
    no_tokens = tensors | {"mask": torch.zeros(6, 8, dtype=torch.bool)}
    no_rows = {name: value[:0] for name, value in tensors.items()}
    for empty in (no_tokens, no_rows):
        assert run("ftis", empty, filter=rule, denominator="kept")[0].item() == 0.0
    for sign in (1, -1):
        far = tensors | {"learner_logprobs": tensors["behaviour_logprobs"] + sign * 1e4}
        with torch.autograd.set_detect_anomaly(True):
            loss, gradient, _ = run("ftis", far, filter=rule)
        assert loss.isfinite() and gradient.isfinite().all()
