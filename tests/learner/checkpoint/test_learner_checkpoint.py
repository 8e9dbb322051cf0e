"""Checkpoints resume a run bit for bit. Damaged ones are skipped and reported, and those of other runs refused."""

from __future__ import annotations

import hashlib
import json
import shutil

import msgspec
import pytest
import torch
from learner_rig import SMALL, checkpoint_tensors, make_boot, random_groups, train_steps, without_times
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

from ftis_node.config.workers import LoraSection
from ftis_node.errors import ConfigError, ModelError
from ftis_node.learner.checkpoint.checkpoint_files import PIECE_BYTES, checksum_of, write_checksums
from ftis_node.learner.core import Learner

LORA = LoraSection(rank=4, alpha=8)
FILES = ("weights.safetensors", "optimizer.safetensors", "state.json")


@pytest.fixture(scope="module")
def trained_home(model_folder, tmp_path_factory):
    """Return a home with checkpoints of steps 2 and 3."""
    home = tmp_path_factory.mktemp("home")
    train_steps(Learner(make_boot(model_folder, home)), 1, 2, 3)
    return home


@pytest.fixture
def home(trained_home, tmp_path):
    return shutil.copytree(trained_home, tmp_path / "home")


def test_a_checksum_depends_on_every_piece_and_its_position(tmp_path):
    path = tmp_path / "file"
    first, second = bytes(PIECE_BYTES), b"\x01" * PIECE_BYTES
    sums = []
    for content in (b"", first, second, first + second, second + first, first + second + b"\0"):
        path.write_bytes(content)
        sums.append(checksum_of(path))
        assert checksum_of(path) == sums[-1]
    assert len(set(sums)) == len(sums)
    path.write_bytes(b"abc")
    assert checksum_of(path) == hashlib.blake2b(bytes.fromhex("352441c2"), digest_size=16).hexdigest()


SETTINGS = {
    "schedule": "cosine",
    "warmup_steps": 2,
    "decay_steps": 3,
    "kl_coef": 0.1,
    "updates_per_batch": 2,
    "weight_decay": 0.01,
    "micro_batch_tokens": 40,
}


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(model_folder, tmp_path, lora):
    """The settings cover what a step depends on: the schedule, the initial model, two updates per batch, randomness."""
    reports = {}
    for name, runs in (("straight", [(1, 2, 3, 4, 5, 6)]), ("resumed", [(1, 2, 3), (4, 5, 6)])):
        boot = make_boot(model_folder, tmp_path / name, lora=lora, **SETTINGS)
        reports[name] = []
        for steps in runs:
            torch.manual_seed(len(steps))  # the result must not depend on a state outside of the checkpoint
            learner = Learner(boot)
            assert learner.state().step == learner.state().policy_version == steps[0] - 1
            for step in steps:
                torch.rand(5)  # changes the random state between two checkpoints
                reply = learner.train(random_groups(seed=step, **SMALL), step=step)
                reports[name].append(without_times(reply.report))
        reports[name].append(learner.state().proof)
    assert reports["resumed"] == reports["straight"]
    assert all(report.num_updates == 2 for report in reports["straight"][:-1])
    assert len({report.learning_rate for report in reports["straight"][:-1]}) == 5, "steps 5 and 6 have the final rate"
    assert reports["straight"][5].kl_to_start > 0
    straight, resumed = (checkpoint_tensors(tmp_path / name, step=6) for name in ("straight", "resumed"))
    assert straight.keys() == resumed.keys()
    num_moments = 3  # the first, the second, and the count of steps
    assert len(straight) == (1 + num_moments) * len(learner.policy.trainable()) + 1, "and torch's random state"
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)


def test_the_random_state_of_a_gpu_is_restored(model_folder, tmp_path, monkeypatch):
    """The test provides the random state of a GPU, because there is none."""
    state, restored = torch.arange(16, dtype=torch.uint8), []
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    with monkeypatch.context() as gpu:
        gpu.setattr(torch.cuda, "is_initialized", lambda: True)
        gpu.setattr(torch.cuda, "get_rng_state", lambda: state)
        train_steps(Learner(make_boot(model_folder, tmp_path)), 1)
        Learner(make_boot(model_folder, tmp_path))
    assert len(restored) == 1
    assert torch.equal(restored[0], state)
    assert Learner(make_boot(model_folder, tmp_path)).state().step == 1, "it is not restored without a GPU"
    assert len(restored) == 1


def test_a_lora_checkpoint_contains_only_the_adapter(model_folder, tmp_path):
    train_steps(Learner(make_boot(model_folder, tmp_path, lora=LORA)), 1)
    tensors = load_file(tmp_path / "checkpoints" / "step-00000001" / "weights.safetensors")
    assert tensors
    assert all(".lora_" in name for name in tensors)


def test_old_checkpoints_are_pruned_and_the_state_is_readable(home):
    assert sorted(path.name for path in (home / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    state = json.loads((home / "checkpoints" / "step-00000003" / "state.json").read_text())
    assert state["step"] == state["policy_version"] == state["last_report"]["step"] == 3
    assert state["owner"]["run_id"] == "run-a"
    assert state["last_groups"] == ["group-0", "group-1"]
    assert state["versions"].keys() == {"ftis-node", "torch", "python"}


def invalid_header(checkpoint):
    (checkpoint / "weights.safetensors").write_bytes(b"\xff" * 64)


def truncated(checkpoint):
    path = checkpoint / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def missing_file(checkpoint):
    (checkpoint / "optimizer.safetensors").unlink()


def wrong_shape(checkpoint):
    path = checkpoint / "weights.safetensors"
    save_file(load_file(path) | {"model.norm.weight": torch.ones(3)}, path)
    write_checksums(checkpoint, FILES)


def wrong_moment(checkpoint):
    path = checkpoint / "optimizer.safetensors"
    save_file(load_file(path) | {"model.norm.weight.exp_avg": torch.ones(3)}, path)
    write_checksums(checkpoint, FILES)


def invalid_state(checkpoint):
    (checkpoint / "state.json").write_text("{")
    write_checksums(checkpoint, FILES)


def state_incomplete(checkpoint):
    (checkpoint / "state.json").write_text("{}")
    write_checksums(checkpoint, FILES)


def state_empty(checkpoint):
    (checkpoint / "state.json").write_bytes(b"")


def flipped_bit(name):
    """Return a function that flips a bit among the numbers of a file, which safetensors does not detect."""

    def flip(checkpoint):
        content = bytearray((checkpoint / name).read_bytes())
        content[len(content) * 3 // 4] ^= 1
        (checkpoint / name).write_bytes(content)

    return flip


def no_checksums(checkpoint):
    (checkpoint / "checksums.json").unlink()


DAMAGES = {
    "header": (invalid_header, "weights.safetensors changed on disk"),
    "cut": (truncated, "optimizer.safetensors changed on disk"),
    "missing": (missing_file, "optimizer.safetensors cannot be read"),
    "shape": (wrong_shape, "does not hold the trained tensors"),
    "moment": (wrong_moment, "belongs to no trained tensor"),
    "state": (invalid_state, "state.json cannot be read"),
    "fields": (state_incomplete, "state.json cannot be read"),
    "empty": (state_empty, "state.json changed on disk"),
    "bit of a weight": (flipped_bit("weights.safetensors"), "weights.safetensors changed on disk"),
    "bit of a moment": (flipped_bit("optimizer.safetensors"), "optimizer.safetensors changed on disk"),
    "bit of the state": (flipped_bit("state.json"), "state.json changed on disk"),
    "sums": (no_checksums, "checksums.json cannot be read"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_skipped_and_reported(model_folder, home, damage, message):
    damage(home / "checkpoints" / "step-00000003")
    skipped = []
    learner = Learner(make_boot(model_folder, home), on_event=skipped.append)
    assert learner.state().step == 2
    (event,) = skipped
    assert event.name == "step-00000003"
    assert message in event.reason
    # It is renamed. Otherwise it would count as the newest when old ones are pruned.
    train_steps(learner, 3, 4)
    names = sorted(path.name for path in (home / "checkpoints").iterdir())
    assert names == ["damaged-step-00000003", "step-00000003", "step-00000004"]


def test_checkpoints_that_are_all_unreadable_are_an_error(model_folder, home):
    for checkpoint in (home / "checkpoints").iterdir():
        invalid_header(checkpoint)
    with pytest.raises(ModelError, match="none of the 2 checkpoints .* can be read"):
        Learner(make_boot(model_folder, home))
    assert len(list((home / "checkpoints").glob("step-*"))) == 2


def test_a_folder_without_its_marker_is_not_a_checkpoint(model_folder, home):
    (home / "checkpoints" / "step-00000003" / "COMPLETE").unlink()
    skipped = []
    learner = Learner(make_boot(model_folder, home), on_event=skipped.append)
    assert (learner.state().step, skipped) == (2, [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_id": "run-b"}, "this home belongs to run run-a, not run-b"),
        ({"lora": LORA}, "was trained as full, not LoRA of rank 4"),
    ],
)
def test_a_checkpoint_of_another_run_or_form_is_refused(model_folder, home, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Learner(make_boot(model_folder, home, **changes))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_model_of_the_same_name_with_other_weights_is_refused(home, tmp_path):
    other = save_tiny(tmp_path / "tiny", seed=77)
    with pytest.raises(ConfigError, match="this home trains tiny, not another model of the name tiny"):
        Learner(make_boot(other, home))


def test_a_renamed_folder_of_the_same_model_is_resumed(model_folder, home):
    assert Learner(make_boot(model_folder, home, model_name="renamed")).state().step == 3


def test_training_settings_may_change_at_a_restart(model_folder, home):
    boot = make_boot(model_folder, home, learning_rate=5e-4, method="tis")
    learner = train_steps(Learner(boot), 4)
    assert learner._optimizer.param_groups[0]["lr"] == 5e-4
    assert learner.state().step == 4


def test_the_last_report_is_restored(model_folder, home):
    learner = Learner(make_boot(model_folder, home))
    report = learner.state().last_report
    assert (report.step, report.repeated) == (3, False)
    assert report.grad_norm > 0
    again = learner.train(random_groups(seed=3, **SMALL), step=3)
    assert again.report == msgspec.structs.replace(report, repeated=True)
