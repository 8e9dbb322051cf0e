"""Completions that a peer with another tokenizer sent as text: weighted by the ratio of the means, or filtered."""

import math

import pytest
import torch
from learner_rig import as_text, check_gradient, make_group, random_groups
from msgspec.structs import replace
from tiny_models import make_model

from ftis_node.learner.batch import make_batch, make_micro_batches
from ftis_node.learner.step.objective import Objective
from ftis_node.learner.step.train_step import Passes

PARAMS = {"dr_grpo": {"max_completion_length": 12}}


def text_group(completions, rewards, means, *, number=9):
    """Return a foreign group of texts, without log-probs by token."""
    return as_text(make_group(completions, rewards, number=number, own=False), means)


def log(*values):
    return [math.log(value) for value in values]


def by_hand(method, group, learner, *, first_pass=None, **params):
    """Return the loss, its gradient `[N, T]` and the metrics. `learner` has probabilities, `[N, T]`."""
    batch = make_batch(group if isinstance(group, list) else [group])
    objective = Objective(method, params, "mean")
    leaf = torch.tensor([log(*row) for row in learner], requires_grad=True)
    loss, metrics = objective.loss(leaf, batch, objective.advantages(batch), first_pass=first_pass)
    loss.backward()
    return loss.item(), leaf.grad, metrics


FOUR = text_group([[1, 2], [3, 4], [5, 6], [7, 8]], [1.0, 1.0, 0.0, 0.0], log(0.4, 0.025, 0.1, 0.1))
# The learner's geometric means are 0.1, 0.5, 0.1, 0.1; A is 0.5, 0.5, -0.5, -0.5 and the weights 1/4 and 20, capped.
LEARNER = [[0.2, 0.05], [0.5, 0.5], [0.1, 0.1], [0.1, 0.1]]


@pytest.mark.parametrize("method", ["nois", "tis", "ftis"])
def test_loss_gradient_and_metrics_by_hand(method):
    loss, gradient, metrics = by_hand(method, FOUR, LEARNER)
    # -1/4 sum of weight * A * (ratio 1): -(0.25 * 0.5 + 2 * 0.5) / 4
    assert loss == pytest.approx(-0.28125, rel=1e-6)
    # d/dlp of one of two tokens: half of a completion's share
    expected = [[-0.015625] * 2, [-0.125] * 2, [0.0] * 2, [0.0] * 2]
    assert torch.allclose(gradient, torch.tensor(expected), rtol=1e-5, atol=0)
    assert metrics == {"kept_fraction": 0.5, "truncated_fraction": 0.0, "mean_kl": 0.0}


def test_a_group_without_kept_texts_has_no_gradient():
    without_signal = text_group([[1, 2], [3, 4]], [0.0, 0.0], log(0.4, 0.4))
    loss, gradient, metrics = by_hand("ftis", without_signal, LEARNER[:2], denominator="kept")
    assert (loss, gradient.abs().sum().item(), metrics["kept_fraction"]) == (0.0, 0.0, 0.0)


def test_texts_do_not_change_rows_of_tokens():
    exact = make_group([[1, 2], [3, 4]], [1.0, 0.0], number=1, own=False, logprobs=[log(0.1, 0.1), log(0.2, 0.05)])
    alone, alone_gradient, alone_metrics = by_hand("ftis", exact, LEARNER[:2])
    texts, texts_gradient, _ = by_hand("ftis", FOUR, LEARNER)
    both, gradient, metrics = by_hand("ftis", [exact, FOUR], [*LEARNER[:2], *LEARNER])
    assert both == pytest.approx((2 * alone + 4 * texts) / 6, rel=1e-5)
    assert torch.allclose(gradient[:2] * 6, alone_gradient * 2, rtol=1e-5)
    assert torch.allclose(gradient[2:] * 6, texts_gradient * 4, rtol=1e-5)
    assert metrics["kept_fraction"] == pytest.approx((2 + 2) / 6)
    assert metrics["mean_kl"] == pytest.approx(alone_metrics["mean_kl"]), "texts have no KL"


@pytest.mark.parametrize("rule", ["quantile", "ess"])
@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_sender_filters_do_not_change_texts(rule, denominator):
    params = {"filter": rule, "keep_share": 0.0, "denominator": denominator}
    assert by_hand("ftis", FOUR, LEARNER, **params)[0] == by_hand("ftis", FOUR, LEARNER, denominator=denominator)[0]
    assert by_hand("ftis", FOUR, LEARNER, **params)[2]["kept_fraction"] == 0.5
    exact = make_group([[1, 2], [3, 4]], [1.0, 0.0], number=1, own=False, logprobs=[log(0.9, 0.9), log(0.9, 0.9)])
    far = [[0.01, 0.01], [0.01, 0.01]]
    _, gradient, metrics = by_hand("ftis", [exact, FOUR], [*far, *LEARNER], **params)
    assert gradient[1].abs().sum() == 0
    assert metrics["kept_fraction"] == pytest.approx((1 + 2) / 6)


def mixed_groups():
    exact = random_groups(num_groups=3, group_size=4, seed=3)
    texts = [
        text_group(
            [[10 * number + 1, 2, 3], [4], [5, 6], [7] * 8], [1.0, 0.0, 1.0, 0.5], [-5.0, -6.0, -5.5, -1.0],
            number=number,
        )
        for number in (7, 8)
    ]  # fmt: skip
    return [*exact, *texts]


@pytest.mark.parametrize("method", ["ftis", "gepo", "dr_grpo", "m2po"])
def test_the_gradient_of_texts_does_not_depend_on_micro_batches(method):
    check_gradient(make_model(seed=1), make_batch(mixed_groups()), Objective(method, PARAMS.get(method, {})))


def test_a_later_update_is_clipped_relative_to_the_first_pass():
    """PPO's clip applies to texts. Their weight, 1/4, is that of the first pass."""
    first_pass = torch.tensor([log(*row) for row in LEARNER])
    moved = [[0.3, 0.075], *LEARNER[1:]]  # 1.5 times as likely: beyond PPO's clip, so no gradient
    for denominator in ("all", "kept"):
        loss, gradient, _ = by_hand("ftis", FOUR, moved, first_pass=first_pass, denominator=denominator)
        assert gradient[0].abs().sum() == 0
        assert gradient[1].abs().sum() > 0
        num_counted = {"all": 4, "kept": 2}[denominator]
        assert loss == pytest.approx(-(0.25 * 1.2 * 0.5 + 2 * 0.5) / num_counted, rel=1e-6)


def test_a_learner_log_prob_that_is_not_finite_refuses_a_step_with_texts():
    batch = make_batch([text_group([[1], [2]], [1.0, 0.0], [-1.0, -1.0])])

    def broken(micro_batch):
        return torch.full((len(micro_batch.cell_index),), math.nan, requires_grad=True)

    micro_batches = make_micro_batches(batch, max_tokens=60)
    found = Passes(broken, batch, micro_batches).gradients(Objective("ftis", {}))
    assert found.refused == "a learner log-prob is not finite"


@pytest.mark.parametrize("mean", [math.nan, -math.inf])
def test_a_mean_that_is_not_finite_refuses_the_step(mean):
    batch = make_batch([text_group([[1], [2]], [1.0, 0.0], [mean, -1.0])])
    found = Passes(lambda _: pytest.fail("no pass is needed"), batch, []).gradients(Objective("ftis", {}))
    assert found.refused == "a behaviour log-prob is not finite"


@pytest.mark.parametrize(
    "changes",
    [{"text_token_ids": ((1, 2), (3,))}, {"text_token_ids": ()}, {"rewards": (1.0, 0.0)}, {"prompt_ids": b""}],
    ids=["more ids than texts", "no ids", "more rewards than texts", "no prompt"],
)
def test_inconsistent_parts_of_texts_are_refused(changes):
    valid = text_group([[1, 2]], [1.0], [-1.0])
    with pytest.raises(ValueError, match="cannot be trained on"):
        make_batch([replace(valid, **changes)])
