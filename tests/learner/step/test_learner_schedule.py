"""The learning rate schedule on values computed by hand, and its use by the learner."""

import math

import pytest
from learner_rig import SMALL, make_boot, random_groups

from ftis_node.config.step import OptimizerSection
from ftis_node.learner.core import Learner
from ftis_node.learner.step import optimizer


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (OptimizerSection(), [8, 8, 8, 8]),
        (OptimizerSection(warmup_steps=4), [2, 4, 6, 8, 8]),
        (OptimizerSection(schedule="linear", decay_steps=4), [8, 6.2, 4.4, 2.6, 0.8, 0.8]),
        (OptimizerSection(schedule="linear", warmup_steps=2, decay_steps=2), [4, 8, 4.4, 0.8, 0.8]),
        (OptimizerSection(schedule="linear", warmup_steps=1, decay_steps=2), [8, 4.4, 0.8]),
        (OptimizerSection(schedule="cosine", decay_steps=3), [8, 6.2, 2.6, 0.8, 0.8]),
        (OptimizerSection(schedule="cosine", warmup_steps=2, decay_steps=2), [4, 8, 4.4, 0.8, 0.8]),
    ],
)
def test_rates_by_hand(schedule, rates):
    steps = range(1, len(rates) + 1)
    assert [schedule.learning_rate_at(step, peak=8.0) for step in steps] == pytest.approx(rates)


def test_adam_moves_by_the_rate_of_the_step(model_folder, tmp_path, monkeypatch):
    """Adam's first update is the rate times the sign of the gradient, so the weights show the rate."""
    monkeypatch.setattr(optimizer, "ADAM_EPS", 1e-30)
    schedule = {"schedule": "linear", "warmup_steps": 4, "decay_steps": 10}
    boot = make_boot(model_folder, tmp_path, learning_rate=8e-3, **schedule, max_grad_norm=0.0)
    learner = Learner(boot)
    weight = learner.policy.trainable()["model.norm.weight"]
    before = weight.detach().clone()
    report = learner.train(random_groups(**SMALL), step=1).report
    assert report.learning_rate == pytest.approx(2e-3)
    assert (weight - before).abs().max().item() == pytest.approx(2e-3, rel=1e-3)
    assert learner.train(random_groups(**SMALL), step=2).report.learning_rate == pytest.approx(4e-3)
    assert learner.train([], step=3).report.learning_rate is None, "a step without groups has no rate"
    assert learner.train(random_groups(**SMALL), step=4).report.learning_rate == pytest.approx(8e-3)


def test_a_maximal_norm_of_zero_does_not_clip(model_folder, tmp_path, monkeypatch):
    """With an epsilon far above the gradient, Adam's first update is about rate x gradient / eps."""
    monkeypatch.setattr(optimizer, "ADAM_EPS", 1e3)
    moves = {}
    for norm in (0.0, 1e-3):
        boot = make_boot(model_folder, tmp_path / str(norm), max_grad_norm=norm, learning_rate=1.0)
        learner = Learner(boot)
        weights = list(learner.policy.trainable().values())
        before = [weight.detach().double() for weight in weights]
        report = learner.train(random_groups(**SMALL), step=1).report
        squares = [((weight.double() - old) ** 2).sum().item() for weight, old in zip(weights, before, strict=True)]
        moves[norm] = math.sqrt(sum(squares)) * 1e3
        assert report.grad_norm > 0.1
    assert moves[0.0] == pytest.approx(report.grad_norm, rel=0.05)
    assert moves[1e-3] < 0.05 * moves[0.0]
