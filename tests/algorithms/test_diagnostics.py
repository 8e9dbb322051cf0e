"""Diagnostics by sender: sums by hand, weights of the gradient, finite values; and `likelihood_gain`."""

import math
from typing import Any

import pytest
import torch

from ftis_node.algorithms import policy_loss
from ftis_node.algorithms.batch import read_batch
from ftis_node.algorithms.diagnostics import likelihood_gain, objective_slopes, sender_sums
from ftis_node.algorithms.methods import METHODS, find_method
from ftis_node.algorithms.settings import make_settings

from .by_hand import rows
from .cases import make_case

# Two tokens with rho 2 and 1, and one token with rho 1/2.
LEARNER, BEHAVIOUR = [[0.5, 0.2], [0.1]], [[0.25, 0.2], [0.2]]
Q = (0.05 + 0.04) / (math.sqrt(0.05) + 0.2)  # GEPO's E_q of these completions


def sums_of(method: str, batch: dict[str, torch.Tensor], senders: list[int], **params: Any) -> dict[str, Any]:
    sender_ids = torch.tensor(senders)
    found = sender_sums(method, **batch, sender_ids=sender_ids, num_senders=max(senders) + 1, **params)
    return {name: values.tolist() for name, values in found.items()}


def test_two_senders_by_hand():
    learner = [[0.5, 0.2], [0.1], [0.01], [0.5], [0.3]]
    behaviour = [[0.25, 0.2], [0.4], [0.2], [0.05], [0.3]]  # rho 2, 1; 1/4; 1/20; 10; 1
    batch = rows(learner, behaviour, [1.0, -3.0, -1.0, 1.0, 0.0], [0, 0, 1, 1, 2])
    found = sums_of("ftis", batch, [0, 0, 1, 1, 1], cap=1.5, kl_threshold=10.0)
    near, far = (math.log(2) - 0.5) / 2, 20 + math.log(0.05) - 1  # far is above 10, so it is dropped
    expected = {
        "groups": (1, 2),
        "groups_with_signal": (1, 1),
        "completions": (2, 3),
        "negatives": (1, 1),
        "kept": (2, 2),
        "kept_negatives": (1, 0),
        "trained": (2, 1),
        "clipped": (0, 0),
        "weight_sum": (1.25 + 0.25, 1.5),
        "weight_square_sum": (1.25**2 + 0.25**2, 1.5**2),
        "tokens": (3, 3),
        "measured": (2, 3),
        "measured_tokens": (3, 3),
        "truncated_tokens": (1, 1),
        "log_ratio_sum": (-math.log(2), -math.log(2)),
        "kl_sum": (near + 4 - math.log(4) - 1, far + 0.1 + math.log(10) - 1),
    }
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values), name


@pytest.mark.parametrize(
    ("method", "params", "weights", "clipped"),
    [
        ("nois", {}, (1.0, 1.0), (0, 0)),
        ("tis", {"cap": 1.5}, (1.25, 0.5), (0, 0)),
        ("vis", {}, (0.5, 0.0), (0, 1)),  # rho 2 with A > 0 is clipped, and rho 1/2 with A < 0
        ("dapo", {"eps_low": 0.6, "eps_high": 2.0}, (1.5, 0.5), (0, 0)),
        ("mis", {"mis_low": 0.8, "mis_high": 1.5}, (0.5, 0.0), (0, 1)),
        ("gspo", {}, (0.0, 0.0), (1, 1)),
        ("gspo", {"eps_low": 0.9, "eps_high": 9.0}, (math.sqrt(2), 0.5), (0, 0)),
        ("gepo", {"clip": False, "k3_beta": 0.5}, (math.sqrt(0.1) / Q, 0.1 / Q), (0, 0)),
        ("topr", {}, (1.0, 0.5), (0, 0)),
        ("m2po", {"m2_threshold": 0.1}, (0.5, 0.0), (0, 1)),
    ],
)
def test_weights_by_hand(method, params, weights, clipped):
    found = sums_of(method, rows(LEARNER, BEHAVIOUR, [1.0, -3.0]), [0, 1], **params)
    assert found["weight_sum"] == pytest.approx(weights)
    assert found["weight_square_sum"] == pytest.approx([weight**2 for weight in weights])
    assert found["clipped"] == list(clipped)


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_those_of_the_gradient(method):
    """Without a filter and with the mean over N, -dL/dlp of a token is A times its part of the weight, over N."""
    case = make_case(3, 9, 7, "near").tensors(torch.float64)
    params = {"agg": "seq_mean", "kl_threshold": math.inf}
    all_own = {"sender_ids": torch.zeros(9, dtype=torch.int64)} if method == "accepted" else {}  # it filters others
    loss, _ = policy_loss(method, **case, **params, **all_own)
    (gradient,) = torch.autograd.grad(loss, case["learner_logprobs"])
    row = find_method(method)
    settings = make_settings(row.defaults, params)
    slopes = objective_slopes(row, read_batch(**case), settings)
    assert torch.allclose(-gradient * len(gradient), case["advantages"][:, None] * slopes, atol=1e-12)
    assert not slopes.requires_grad and bool((slopes >= 0).all())


def test_the_quantile_filter_compares_completions_of_one_sender():
    """This node and two peers have negatives at rho 1/2 and 1/4. Kept are both own ones and each peer's nearer one."""
    senders, quantile = [0, 0, 1, 1, 2, 2], {"filter": "quantile", "keep_share": 0.5}
    batch = rows([[0.1], [0.1]] * 3, [[0.2], [0.4]] * 3, [-1.0] * 6, senders)
    found = sums_of("ftis", batch, senders, **quantile)
    assert found["kept_negatives"] == [2, 1, 1]
    assert found["weight_sum"] == pytest.approx([0.75, 0.5, 0.5])
    found = sums_of("ftis", batch, senders, **quantile, is_text=torch.ones(6).bool(), text_weights=torch.ones(6))
    assert found["kept_negatives"] == [0, 0, 0]


def test_obrs_keeps_completions_of_which_it_rejects_all_tokens():
    found = sums_of("ftis", rows(LEARNER, BEHAVIOUR, [1.0, -1.0], [0, 0]), [0, 1], filter="obrs", obrs_lambda=1e12)
    assert [found[name] for name in ("kept", "trained", "clipped")] == [[1, 1]] * 3
    assert found["weight_sum"] == [0.0, 0.0]


def test_texts_have_a_weight_and_no_ratios():
    batch = rows([[0.5], [0.5], [0.5]], [[0.5], [0.5], [0.25]], [1.0, -1.0, 1.0])
    is_text, weights = torch.tensor([True, True, False]), torch.tensor([1.75, 0.5, 0.0])
    found = sums_of("tis", batch, [0, 0, 0], is_text=is_text, text_weights=weights)
    assert (found["completions"], found["kept"], found["kept_negatives"]) == ([3], [2], [0])
    assert (found["trained"], found["clipped"]) == ([2], [0])
    assert found["weight_sum"] == pytest.approx([1.75 + 2.0])
    assert (found["tokens"], found["measured"], found["measured_tokens"]) == ([3], [1], [1])
    assert found["log_ratio_sum"] == pytest.approx([math.log(2)])


@pytest.mark.parametrize(("method", "estimator"), [*((name, "author_k3") for name in METHODS), ("ftis", "rkl_iw")])
def test_every_figure_is_finite_for_any_log_prob_of_a_peer(method, estimator):
    claims = (0.0, -1e-30, -40.0, -1e4, -3e38, 3e38)
    learner = torch.tensor([[own] * 3 for own in (-1e-6, -300.0) for _ in claims], dtype=torch.float32)
    behaviour = torch.tensor([[claim, -1.0, claim] for claim in claims] * 2, dtype=torch.float32)
    advantages = torch.tensor([1.0, -1.0] * len(claims))
    batch = {
        "learner_logprobs": learner,
        "behaviour_logprobs": behaviour,
        "mask": torch.ones_like(learner, dtype=torch.bool),
        "advantages": advantages,
        "group_ids": torch.zeros(len(advantages), dtype=torch.int64),
    }
    params = {"kl_estimator": estimator, "max_completion_length": 3}
    for name, values in sums_of(method, batch, [0] * len(advantages), **params).items():
        assert torch.tensor(values, dtype=torch.float64).isfinite().all(), name


def test_an_empty_completion_is_not_measured():
    batch = rows([[0.5], []], [[0.25], []], [1.0, -1.0])
    found = sender_sums("ftis", **batch, sender_ids=torch.tensor([2, 2]), num_senders=3)
    assert (found["completions"].tolist(), found["measured"].tolist()) == ([0, 0, 2], [0, 0, 1])
    assert found["clipped"].tolist() == [0, 0, 0]
    assert found["weight_sum"].tolist() == pytest.approx([0, 0, 2.0])


def test_by_hand():
    learner = torch.tensor([[-1.0, -2.0, math.nan], [-0.5, -0.25, -0.25]], requires_grad=True)
    behaviour = torch.tensor([[-4.0, -1.0, math.nan], [-12.0, -12.0, -12.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    gain = likelihood_gain(learner, behaviour, mask)
    assert gain.tolist() == pytest.approx([3.0 - math.log(2), 36.0 - 1.0 - math.log(2)])  # row 0: its first token
    assert not gain.requires_grad and gain.dtype == torch.float64


@pytest.mark.parametrize("num_tokens", [8, 64])
def test_honest_samples_exceed_a_limit_at_most_as_often_as_the_bound(num_tokens):
    """Two unrelated policies: one samples 20,000 completions, the other scores them."""
    torch.manual_seed(7)
    generator, learner = torch.randn(num_tokens, 50).mul(1.5).log_softmax(1), torch.randn(num_tokens, 50).log_softmax(1)
    ids = torch.distributions.Categorical(logits=generator).sample(torch.Size([20_000]))[..., None]
    shape = (20_000, num_tokens)
    learner_logprobs, behaviour_logprobs = (
        table.expand(20_000, -1, -1).gather(2, ids).view(shape) for table in (learner, generator)
    )
    gain = likelihood_gain(learner_logprobs, behaviour_logprobs, torch.ones(shape, dtype=torch.bool))
    for limit in (1.0, 2.0, 4.0):
        assert (gain >= limit).double().mean() <= math.exp(-limit), limit


def test_the_gain_of_a_later_part_by_hand():
    """Four tokens of -20 nats precede four of +10. The sum is -40, and +40 from the fifth token, one of 7 starts."""
    learner = torch.tensor([[0.0] * 8])
    behaviour = torch.tensor([[20.0] * 4 + [-10.0] * 4])
    gain = likelihood_gain(learner, behaviour, torch.ones(1, 8, dtype=torch.bool))
    assert gain.item() == pytest.approx(40.0 - math.log(2 * 7))


@pytest.mark.parametrize("order", ["understated first", "understated last", "alternating"])
def test_overstated_tokens_do_not_hide_understated_ones(order):
    """The sum over the completion is below 0 in each case. With `alternating` no part gains enough to be detected."""
    num_tokens = 64
    low, high = torch.full((num_tokens // 2,), -4.0), torch.full((num_tokens // 2,), 5.0)
    gains = {
        "understated first": torch.cat([-low, -high]),
        "understated last": torch.cat([-high, -low]),
        "alternating": torch.stack([-low, -high], dim=1).flatten(),
    }[order]
    assert gains.sum() < 0
    behaviour = -gains[None]
    gain = likelihood_gain(torch.zeros(1, num_tokens), behaviour, torch.ones(1, num_tokens, dtype=torch.bool))
    assert (gain.item() > 16.0) is (order != "alternating")
