"""The optimizer: the schedule of its rate, 8-bit moments, and float32 masters of bfloat16 weights."""

import math
import sys

import pytest
import torch
from learner_rig import SMALL, make_boot, random_groups, train_steps
from safetensors.torch import load_file
from tiny_models import save_tiny
from torch.nn import Parameter

from ftis_node.config.step import OptimizerSection
from ftis_node.config.workers import LoraSection
from ftis_node.errors import ConfigError, MachineError
from ftis_node.learner.learner import Learner
from ftis_node.learner.step import optimizer
from ftis_node.learner.step.optimizer import MasterWeights, make_masters, make_optimizer, moments_of
from tests.published import published_tensors

LORA = LoraSection(rank=64, alpha=64)


def flat(learner):
    return torch.cat([value.detach().flatten() for value in learner.policy.trainable().values()])


def test_8_bit_moments_train_like_float32_ones_in_less_memory(tmp_path):
    folder = save_tiny(tmp_path / "wide", hidden_size=128)
    learners = [
        Learner(make_boot(folder, tmp_path / states, optimizer_states=states, checkpoint_every_steps=100))
        for states in ("float32", "8bit")
    ]
    start = flat(learners[0])
    ends = [flat(train_steps(learner, *range(1, 9))) for learner in learners]
    difference = (ends[1] - ends[0]).norm() / (ends[0] - start).norm()
    assert difference < 0.1
    num_bytes = [
        sum(value.nbytes for value in moments_of(learner._optimizer, learner._masters.tensors).values())
        for learner in learners
    ]
    assert num_bytes[1] < 0.3 * num_bytes[0]


def test_moments_of_another_form_are_refused(model_folder, tmp_path):
    train_steps(Learner(make_boot(model_folder, tmp_path, optimizer_states="8bit")), 1)
    with pytest.raises(ConfigError, match="another form: set learner.optimizer_states to '8bit' if they were"):
        Learner(make_boot(model_folder, tmp_path))


def test_8_bit_moments_without_bitsandbytes_are_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MachineError, match=r"need bitsandbytes: run `pip install -e ..\[8bit\].` in the clone"):
        Learner(make_boot(tmp_path / "no model", tmp_path, optimizer_states="8bit"))


def test_offloading_is_refused_without_a_gpu(tmp_path):
    with pytest.raises(ConfigError, match="without a GPU use 'float32' or '8bit'"):
        Learner(make_boot(tmp_path / "no model", tmp_path, optimizer_states="offload"))


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (OptimizerSection(), [8, 8, 8, 8]), (OptimizerSection(warmup_steps=4), [2, 4, 6, 8, 8]),
        (OptimizerSection(schedule="linear", decay_steps=4), [8, 6.2, 4.4, 2.6, 0.8, 0.8]),
        (OptimizerSection(schedule="linear", warmup_steps=2, decay_steps=2), [4, 8, 4.4, 0.8, 0.8]),
        (OptimizerSection(schedule="linear", warmup_steps=1, decay_steps=2), [8, 4.4, 0.8]),
        (OptimizerSection(schedule="cosine", decay_steps=3), [8, 6.2, 2.6, 0.8, 0.8]),
        (OptimizerSection(schedule="cosine", warmup_steps=2, decay_steps=2), [4, 8, 4.4, 0.8, 0.8]),
    ],
)  # fmt: skip
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


# Half of bfloat16's spacing is 3.8e-6 here, which is above one update of 1e-6 and below fifty.
START = 1.5e-3


def weight(value=START, num=32):
    return Parameter(torch.full((num,), value, dtype=torch.bfloat16))


@pytest.mark.parametrize("states", ["float32", "8bit"])
def test_updates_below_the_spacing_of_bfloat16_add_up(tmp_path, states):
    boot = make_boot("tiny", tmp_path, learning_rate=1e-6, optimizer_states=states)
    ours, num = weight(num=8192), 50
    masters = make_masters({"ours": ours}, boot)
    optimizer = make_optimizer(masters, boot)
    plain = weight()
    control = torch.optim.AdamW([plain], lr=1e-6, weight_decay=0.0)
    before = ours.detach().clone()
    for _ in range(num):
        for parameter, updates in ((ours, optimizer), (plain, control)):
            (3.0 * parameter).sum().backward()
            updates.step()
            updates.zero_grad(set_to_none=True)
    moved = before.float() - masters.tensors["ours"].detach()
    assert moved.allclose(torch.tensor(num * 1e-6), rtol=0.01, atol=0)
    assert ours.detach().equal(masters.tensors["ours"].detach().bfloat16())
    assert (before.float() - ours.detach().float()).allclose(torch.tensor(num * 1e-6), rtol=0, atol=4e-6)
    assert plain.detach().equal(weight().detach()), "updates are lost without masters"


def test_gradients_of_micro_batches_add_up_in_float32():
    ours, plain = weight(), weight()
    masters = MasterWeights({"ours": ours})
    for factor in (1.0, 2.0**-9, 2.0**-9):
        for parameter in (ours, plain):
            (factor * parameter).sum().backward()
    assert masters.tensors["ours"].grad.equal(torch.full((32,), 1 + 2.0**-8))
    assert plain.grad.equal(torch.ones(32, dtype=torch.bfloat16)), "bfloat16 loses small gradients"
    assert ours.grad is None


def test_a_float32_weight_is_its_own_master():
    ours = Parameter(torch.ones(3))
    masters = MasterWeights({"ours": ours})
    assert masters.tensors["ours"] is ours
    ours.sum().backward()
    masters.write_back()
    assert ours.grad is not None


def test_checkpoints_are_float32_and_published_weights_are_rounded(model_folder, tmp_path):
    boot = make_boot(model_folder, tmp_path, dtype="bfloat16", learning_rate=1e-4)
    learner = Learner(boot)
    for step in (1, 2):
        learner.train(random_groups(seed=step), step=step)
    saved = load_file(tmp_path / "checkpoints" / "step-00000002" / "weights.safetensors")
    published = published_tensors(tmp_path / "weights", 2)
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert any(not value.equal(value.bfloat16().float()) for value in saved.values())
    for name, value in saved.items():
        assert published[name].equal(value.bfloat16())
