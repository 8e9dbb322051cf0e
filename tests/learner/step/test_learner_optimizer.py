"""8-bit moments train like float32 ones in a quarter of the memory. Each form is restored bit for bit."""

import sys

import pytest
import torch
from learner_rig import make_boot, train_steps
from safetensors.torch import load_file
from tiny_models import save_tiny

from ftis_node.config.workers import LoraSection
from ftis_node.errors import ConfigError, MachineError
from ftis_node.learner.core import Learner
from ftis_node.learner.step.optimizer import moments_of

LORA = LoraSection(rank=64, alpha=64)


def on_disk(home, step):
    folder = home / "checkpoints" / f"step-{step:08d}"
    return load_file(folder / "weights.safetensors") | load_file(folder / "optimizer.safetensors")


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


@pytest.mark.parametrize(("states", "lora"), [("8bit", LORA), ("float32", None)])
def test_a_resumed_run_equals_an_uninterrupted_one_in_every_form(model_folder, tmp_path, states, lora):
    how = {"optimizer_states": states, "dtype": "bfloat16", "lora": lora, "learning_rate": 1e-4}
    straight = train_steps(Learner(make_boot(model_folder, tmp_path / "a", **how)), 1, 2, 3)
    boot = make_boot(model_folder, tmp_path / "b", **how)
    train_steps(Learner(boot), 1, 2)
    resumed = train_steps(Learner(boot), 3)
    expected, found = on_disk(tmp_path / "a", 3), on_disk(tmp_path / "b", 3)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    assert resumed.state().proof == straight.state().proof


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
