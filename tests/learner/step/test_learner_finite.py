"""An update to non-finite weights is refused and changes nothing."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from learner_rig import make_boot, random_groups

from ftis_node.learner.core import Learner
from ftis_node.learner.step.optimizer import stays_finite


def contents(learner):
    """Return copies of all weights and moments."""
    weights = {name: value.detach().clone() for name, value in learner.policy.trainable().items()}
    moments = {
        f"{name}.{moment}": value.clone()
        for name, master in learner._masters.tensors.items()
        for moment, value in learner._optimizer.state[master].items()
    }
    return weights | moments


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": math.inf},
        {"learning_rate": 1e38},
        {"weight_decay": math.inf},
        {"learning_rate": 1e38, "max_grad_norm": 0.0},
    ],
    ids=str,
)
def test_an_update_to_non_finite_weights_is_refused(model_folder, tmp_path, settings):
    learner, groups = Learner(make_boot(model_folder, tmp_path, **settings)), random_groups(seed=3)
    before = contents(learner)
    reply = learner.train(groups, step=1)
    assert reply.report.refused == "the update would make weights that are not finite"
    assert (reply.report.num_updates, reply.report.policy_version) == (0, 0)
    assert (reply.weights, reply.proof) == (None, None), "no weights are published"
    assert same(contents(learner), before)
    assert not list((tmp_path / "weights").rglob("*.safetensors"))
    optimizer = learner._boot.optimizer.model_copy(update={"learning_rate": 1e-3})
    learner._boot = msgspec.structs.replace(learner._boot, optimizer=optimizer)
    for group in learner._optimizer.param_groups:
        group.update(weight_decay=0.0)
    again = learner.train(groups, step=2)
    assert (again.report.refused, again.report.num_updates, again.weights.version) == (None, 1, 2)
    assert all(value.isfinite().all() for value in contents(learner).values())


def test_a_moment_of_nan_is_detected(model_folder, tmp_path):
    learner, groups = Learner(make_boot(model_folder, tmp_path)), random_groups(seed=3)
    assert learner.train(groups, step=1).report.refused is None
    master = next(iter(learner._masters.tensors.values()))
    learner._optimizer.state[master]["exp_avg_sq"].view(-1)[0] = math.nan
    before = {name: value.detach().clone() for name, value in learner.policy.trainable().items()}
    report = learner.train(groups, step=2).report
    assert report.refused == "the update would make weights that are not finite"
    assert same({name: value.detach() for name, value in learner.policy.trainable().items()}, before)


@pytest.mark.parametrize("gradient", [1e18, 1e-30, 0.0])
@pytest.mark.parametrize(("rate", "least_updates"), [(1e-6, 3), (1.0, 1), (1e20, 0)])
def test_an_update_within_the_bound_is_finite_in_torchs_adam(rate, least_updates, gradient):
    weight = torch.nn.Parameter(torch.tensor([1e10, -3.0]))
    optimizer = torch.optim.AdamW([weight], lr=rate, eps=1e-8, weight_decay=0.1)
    num_updates = 0
    for _ in range(3):
        weight.grad = torch.full_like(weight, gradient)
        if not stays_finite(optimizer):
            break
        optimizer.step()
        num_updates += 1
        assert weight.isfinite().all()
    assert num_updates >= least_updates, "the bound refuses a harmless update"
