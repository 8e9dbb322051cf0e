"""A step is exact for any micro-batches. A refused or stopped step changes nothing."""

import math

import pytest
import torch
from learner_rig import check_gradient, logprobs_by_row, make_group, random_groups
from msgspec.structs import replace
from tiny_models import make_model

from ftis_node.algorithms import policy_loss
from ftis_node.errors import ConfigError, WorkerTaskError
from ftis_node.learner.batch import make_batch, make_micro_batches
from ftis_node.learner.model.logprobs import completion_logprobs
from ftis_node.learner.step.objective import Objective
from ftis_node.learner.step.train_step import Passes, take_step

PARAMS = {"dr_grpo": {"max_completion_length": 12}, "ftis": {"kl_threshold": 0.05}, "gepo": {"k3_beta": 0.005}} | {
    "f-vis": {"filter": "obrs"}
}


@pytest.fixture
def model():
    return make_model(seed=1)


@pytest.fixture(scope="module")
def batch():
    return make_batch(random_groups(num_groups=5, group_size=4))


def flat_weights(model):
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


class Forward:
    """The model's log-probs, with a counter of forward passes."""

    def __init__(self, model):
        self.model = model
        self.num_runs = 0

    def __call__(self, micro_batch):
        self.num_runs += 1
        return completion_logprobs(self.model, micro_batch)


@pytest.mark.parametrize("method", ["ftis", "gepo", "gspo_token", "dr_grpo", "m2po", "f-vis"])
def test_the_gradient_is_exact_for_any_micro_batches(model, batch, method):
    check_gradient(model, batch, Objective(method, PARAMS.get(method, {})))


@pytest.mark.parametrize("method", ["ftis", "m2po"])
def test_the_gradient_with_a_kl_term_is_exact_for_any_micro_batches(model, batch, method):
    """`m2po` compares tokens of all completions, so it needs two passes over the model. `ftis` needs one."""
    with torch.no_grad():
        reference = logprobs_by_row(make_model(seed=2), batch)
    metrics = check_gradient(model, batch, Objective(method, {}, kl_to_start=0.25), reference=reference)
    assert metrics["kl_to_start"] > 0.01


@pytest.mark.parametrize(("method", "rule"), [("ftis", "quantile"), ("f-nois", "ess")])
def test_sender_filters_are_exact_for_any_micro_batches(model, method, rule):
    """There are four senders, one of them far. The rows of one sender are in several micro-batches."""
    groups = random_groups(num_groups=8, group_size=4)
    groups = [replace(group, own=number < 2, sender=f"{number % 3}") for number, group in enumerate(groups)]
    far = random_groups(num_groups=3, group_size=4, seed=7, distance=3.0)
    groups += [replace(group, own=False, sender="far") for group in far]
    objective = Objective(method, {"filter": rule, "keep_share": 0.4})
    metrics = check_gradient(model, make_batch(groups), objective)
    assert 0.4 < metrics["kept_fraction"] < 0.9


@pytest.mark.parametrize("method", ["ftis", "gepo"])
def test_a_later_update_is_exact_for_any_micro_batches(model, batch, method):
    """Its gradient is that of one graph over the batch with the log-probs of the first pass."""
    objective = Objective(method, {"alpha": 0.5} if method == "gepo" else {"kl_estimator": "k3_fwd"})
    first_pass = Passes(Forward(model), batch, make_micro_batches(batch, max_tokens=60)).logprobs()
    noise = torch.randn(first_pass.shape, generator=torch.Generator().manual_seed(3))
    check_gradient(model, batch, objective, first_pass=torch.where(batch.mask, first_pass + 0.2 * noise, 0.0))


@pytest.mark.parametrize(
    ("params", "num_forwards"), [({}, 4), ({"denominator": "kept"}, 4 + 2), ({"filter": "ess"}, 4 + 2)]
)
def test_a_separable_loss_needs_one_forward_pass(model, params, num_forwards):
    batch = make_batch(
        [
            make_group([[1, 2], [3, 4]], [0.0, 1.0], number=0),
            make_group([[5] * 9, [6] * 9], [1.0, 1.0], number=1),  # without a signal
        ]
    )
    objective = Objective("ftis", params)
    whole, cut = Forward(model), Forward(model)
    Passes(whole, batch, make_micro_batches(batch, max_tokens=1000)).gradients(objective)
    Passes(cut, batch, make_micro_batches(batch, max_tokens=1)).gradients(objective)
    assert (whole.num_runs, cut.num_runs) == (1, num_forwards)


def optimizer_of(model, learning_rate=1e-2):
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)


def step(model, optimizer, groups, *, objective=None, between=lambda: None, **more):
    batch = make_batch(groups)
    passes = Passes(Forward(model), batch, make_micro_batches(batch, max_tokens=60), between=between)
    return take_step(passes, objective or Objective("ftis", {}), optimizer, **{"max_grad_norm": 1.0} | more)


NOT_APPLIED = {
    "a behaviour log-prob": make_group([[1, 2], [3]], [0.0, 1.0], logprobs=[[-1.0, -math.inf], [-2.0]]),
    "a reward": make_group([[1, 2], [3]], [0.0, math.nan]),
    # All inputs are finite, but a sequence ratio of exp(80) times a large advantage overflows in float32.
    "the loss": make_group([[1, 2], [3]], [0.0, 1e6], logprobs=[[-200.0, -200.0], [-200.0]]),
}


def trained_state(model, optimizer):
    step(model, optimizer, random_groups(seed=9))  # so that the optimizer has moments
    moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
    return flat_weights(model), moments


def assert_unchanged(model, optimizer, before):
    weights, moments = before
    assert torch.equal(flat_weights(model), weights)
    now = [value for state in optimizer.state.values() for value in state.values()]
    assert all(torch.equal(one, other) for one, other in zip(now, moments, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("fault", NOT_APPLIED)
def test_a_value_that_is_not_finite_refuses_the_step(model, fault):
    optimizer = optimizer_of(model)
    before = trained_state(model, optimizer)
    outcome = step(model, optimizer, [NOT_APPLIED[fault]], objective=Objective("gspo", {}, "mean"))
    assert outcome.refused == f"{fault} is not finite"
    assert (outcome.num_updates, outcome.first.grad_norm, outcome.skipped) == (0, 0.0, None)
    assert_unchanged(model, optimizer, before)


def test_a_non_finite_learner_log_prob_is_refused(model):
    optimizer = optimizer_of(model)
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    outcome = step(model, optimizer, random_groups())
    assert outcome.refused == "a learner log-prob is not finite"
    assert not optimizer.state


@pytest.mark.parametrize("factor", [math.inf, math.nan, 1e30])
def test_a_non_finite_gradient_is_refused(model, factor):
    """Log-probs are finite, but their gradient overflows in the backward pass, or would in Adam's second moment."""
    optimizer = optimizer_of(model)
    before = trained_state(model, optimizer)
    model.model.norm.weight.register_hook(lambda gradient: gradient * factor)
    outcome = step(model, optimizer, random_groups())
    assert (outcome.refused, outcome.num_updates) == ("the gradient is not finite", 0)
    assert_unchanged(model, optimizer, before)


def test_a_batch_without_signal_is_skipped_without_an_update(model):
    optimizer = optimizer_of(model)
    before = trained_state(model, optimizer)
    outcome = step(model, optimizer, [make_group([[1, 2], [3]], [1.0, 1.0])])
    assert (outcome.skipped, outcome.num_updates, outcome.refused) == ("no signal", 0, None)
    assert_unchanged(model, optimizer, before)


@pytest.mark.parametrize("stop_after", [0, 4])
def test_a_step_stopped_between_micro_batches_changes_nothing(model, stop_after):
    optimizer = optimizer_of(model)
    before = trained_state(model, optimizer)
    calls = []

    def between():
        calls.append(None)
        if len(calls) > stop_after:
            raise WorkerTaskError("stopped")

    with pytest.raises(WorkerTaskError):
        step(model, optimizer, random_groups(), between=between)
    assert len(calls) == stop_after + 1
    assert_unchanged(model, optimizer, before)


@pytest.mark.parametrize("method", ["ftis", "grpo"])
def test_later_updates_get_the_log_probs_of_the_first_pass(model, monkeypatch, method):
    given = []

    def spy(*arguments, **params):
        given.append((arguments[1].detach().clone(), params["first_pass_logprobs"]))
        return policy_loss(*arguments, **params)

    objective = Objective(method, {})
    monkeypatch.setattr("ftis_node.learner.step.objective.policy_loss", spy)
    outcome = step(model, optimizer_of(model), random_groups(), objective=objective, updates=3)
    assert outcome.num_updates == 3
    calls_per_update = len(make_micro_batches(make_batch(random_groups()), max_tokens=60)) + 1  # one for the figures
    assert len(given) == 3 * calls_per_update
    assert all(first_pass is None for _, first_pass in given[:calls_per_update])
    first, *later = given[calls_per_update - 1 :: calls_per_update]
    for logprobs, first_pass in later:
        assert not torch.equal(logprobs, first[0])  # the model has changed
        assert torch.equal(first_pass, first[0])


def test_a_step_stopped_in_a_later_update_keeps_the_earlier_ones(model):
    """The first update cannot be undone. If the step counted as not done, it would be applied twice."""
    num_passes = len(make_micro_batches(make_batch(random_groups()), max_tokens=60))
    calls = []

    def between():
        calls.append(None)
        if len(calls) > 3 * num_passes:
            raise WorkerTaskError("stopped by a test")

    before, optimizer = flat_weights(model), optimizer_of(model)
    outcome = step(model, optimizer, random_groups(), updates=3, between=between)
    assert (outcome.num_updates, outcome.skipped) == (1, None)
    assert outcome.refused == "update 2 of 3 was not done: stopped by a test"
    assert not torch.equal(flat_weights(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("method", "params"), [("nope", {}), ("ftis", {"cap": -1.0}), ("ftis", {"alpha": 0.1}), ("dr_grpo", {})]
)
def test_invalid_method_settings_are_reported_in_one_line(method, params):
    with pytest.raises(ConfigError, match="the learner's method cannot be set up: ") as caught:
        Objective(method, params)
    assert "\n" not in str(caught.value)


def test_the_rejection_key_decides_which_tokens_obrs_accepts_and_nothing_else(batch):
    def gradient(rule, key):
        logprobs = (batch.behaviour_logprobs - 0.7).requires_grad_()
        objective = Objective("f-nois", {"filter": rule}, rejection_key=key)
        loss, _ = objective.loss(logprobs, batch, objective.advantages(batch), first_pass=None)
        return torch.autograd.grad(loss, logprobs)[0]

    first, largest = gradient("obrs", 1 << 40), gradient("obrs", 2**62 - 1)
    assert torch.equal(first, gradient("obrs", 1 << 40))
    differing = ((first != 0) != (largest != 0)).sum() / batch.mask.sum()
    assert 0.3 < differing < 0.7, "half of the tokens are accepted"
    assert torch.equal(gradient("quantile", 0), gradient("quantile", 2**62 - 1))
