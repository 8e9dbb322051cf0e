"""Advantages of a plug-in that depend on the learner's log-probs: with padding of any kind, and in several passes."""

import dataclasses
import math

import pytest
import torch
from learner_rig import make_boot, random_groups
from msgspec.structs import replace

from ftis_node.learner.batch import make_batch
from ftis_node.learner.learner import Learner
from ftis_node.learner.step.objective import Objective
from tests.algorithms.reference import reference_loss
from tests.algorithms.reference_advantages import learner_advantages

pytestmark = pytest.mark.usefixtures("methods_package", "fresh_plugins")


def groups_of_two_tasks():
    """Return own and foreign groups of two tasks, with a peer's group that is all right."""
    groups = random_groups(8, 4, seed=5)
    groups[1] = replace(groups[1], rewards=(1.0,) * 4)
    return [replace(group, task="hard" if number % 4 < 2 else "easy") for number, group in enumerate(groups)]


@pytest.mark.parametrize("padding", [0.0, 1e30, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_equals_the_reference_whatever_the_padding_holds(dtype, padding):
    batch = make_batch(groups_of_two_tasks())
    noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    behaviour = torch.where(batch.mask, batch.behaviour_logprobs, padding)
    learner = torch.where(batch.mask, (batch.behaviour_logprobs + noise).to(dtype), padding).requires_grad_()
    batch = dataclasses.replace(batch, behaviour_logprobs=behaviour)
    objective = Objective("ftis", {}, "learner")
    assert not objective.separates(batch)
    rows = [
        row[inside].tolist() for row, inside in zip((learner - behaviour).detach().double(), batch.mask, strict=True)
    ]
    ratios = [math.exp(math.fsum(row) / len(row)) for row in rows]
    columns = (each.tolist() for each in (batch.rewards, batch.advantage_ids, batch.sender_ids, batch.task_ids))
    advantages = learner_advantages(*columns, ratios)
    loss, _ = objective.loss(learner, batch, objective.advantages(batch), first_pass=None)
    loss.backward()
    lists = [each.detach().double().tolist() for each in (learner, behaviour)]
    expected = reference_loss("ftis", *lists, batch.mask.tolist(), advantages, batch.group_ids.tolist())
    assert loss.item() == pytest.approx(expected.loss, abs=1e-5 * expected.magnitude)
    assert torch.allclose(learner.grad.double(), torch.tensor(expected.gradient, dtype=torch.float64), atol=1e-7)
    is_right = batch.group_ids == 1
    assert bool((torch.tensor(advantages)[is_right] > 0).all()), "an all-right group of a peer has a signal"


def test_many_passes_give_the_update_of_one(model_folder, tmp_path):
    found = []
    for budget in (4096, 48):
        how = {"method": "ftis", "advantage_scale": "learner", "learning_rate": 0.01, "updates_per_batch": 2}
        boot = make_boot(model_folder, tmp_path / str(budget), micro_batch_tokens=budget, **how)
        report = Learner(boot).train(groups_of_two_tasks(), step=1).report
        assert report.num_updates == 2
        assert all(each.groups_with_signal == each.groups for each in report.by_sender)
        found.append((report.grad_norm, report.loss))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
