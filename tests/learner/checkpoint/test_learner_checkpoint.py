"""Checkpoints: when one is due, writing during later steps, a resume bit for bit, and damaged or foreign ones."""

import json
import shutil
from collections.abc import Callable

import msgspec
import pytest
import torch
from learner_rig import SMALL, checkpoint_tensors, make_boot, make_group, random_groups, train_steps, without_times
from tiny_models import save_tiny

from ftis_node.config.workers import LoraSection
from ftis_node.errors import ConfigError, ModelError
from ftis_node.learner.checkpoint.checkpoint import (
    TrainingProgress,
    newest_usable,
    owner_of,
    state_of,
    write_checkpoint,
    write_checksums,
)
from ftis_node.learner.checkpoint.checkpoint_manager import SHARE, CheckpointSaver
from ftis_node.learner.groups import UnpackedGroup
from ftis_node.learner.learner import Learner
from ftis_node.learner.messages import MAX_UNSAVED_STEPS
from ftis_node.learner.model.policy_loading import load_policy
from ftis_node.learner.train_report import groups_of_start
from ftis_node.records.token_batch import TokenBatch

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


SETTINGS = {"schedule": "cosine", "warmup_steps": 2, "decay_steps": 3, "kl_coef": 0.1, "updates_per_batch": 2}
SMALL_STATES = {"lora": LoraSection(rank=64, alpha=64), "optimizer_states": "8bit", "dtype": "bfloat16"}


@pytest.mark.parametrize("form", [{}, {"lora": LORA}, SMALL_STATES], ids=["full", "lora", "8bit"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(model_folder, tmp_path, form):
    """The settings cover what a step depends on: the schedule, the initial model, two updates per batch."""
    reports = {}
    for name, runs in (("straight", [(1, 2, 3, 4)]), ("resumed", [(1, 2), (3, 4)])):
        boot = make_boot(model_folder, tmp_path / name, micro_batch_tokens=40, **form, **SETTINGS)
        reports[name] = []
        for steps in runs:
            learner = Learner(boot)
            assert learner.state().step == learner.state().policy_version == steps[0] - 1
            for step in steps:
                reply = learner.train(random_groups(seed=step, **SMALL), step=step)
                reports[name].append(without_times(reply.report))
        reports[name].append(learner.state().proof)
    assert reports["resumed"] == reports["straight"]
    assert all(report.num_updates == 2 for report in reports["straight"][:-1])
    assert len({report.learning_rate for report in reports["straight"][:-1]}) == 4
    assert reports["straight"][3].kl_to_start > 0
    straight, resumed = (checkpoint_tensors(tmp_path / name, step=4) for name in ("straight", "resumed"))
    assert straight.keys() == resumed.keys()
    assert len(straight) >= 4 * len(learner.policy.trainable()), "each with two moments and the count of steps"
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)


def test_old_checkpoints_are_pruned_and_the_state_is_readable(home):
    assert sorted(path.name for path in (home / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    state = json.loads((home / "checkpoints" / "step-00000003" / "state.json").read_text())
    assert state["step"] == state["policy_version"] == state["last_report"]["step"] == 3
    assert (state["owner"]["run_id"], state["last_groups"]) == ("run-a", ["group-0", "group-1"])
    assert state["versions"].keys() == {"ftis-node", "torch", "python"}


def truncated(checkpoint):
    path = checkpoint / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def invalid_state(checkpoint):
    (checkpoint / "state.json").write_text("{")
    write_checksums(checkpoint, FILES)


def flipped_bit(checkpoint):
    """Flip a bit among the numbers of a file, which safetensors does not detect."""
    path = checkpoint / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "cut": (truncated, "optimizer.safetensors changed on disk"),
    "missing": (lambda folder: (folder / "optimizer.safetensors").unlink(), "optimizer.safetensors cannot be read"),
    "state": (invalid_state, "state.json cannot be read"),
    "bit of a weight": (flipped_bit, "weights.safetensors changed on disk"),
    "sums": (lambda folder: (folder / "checksums.json").unlink(), "checksums.json cannot be read"),
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
        (checkpoint / "weights.safetensors").write_bytes(b"\xff" * 64)
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


class Clock:
    """A clock in seconds that the test advances."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: float) -> Callable[[], None]:
        def write() -> None:
            self.now += seconds

        return write


def test_a_checkpoint_is_due_after_the_set_number_of_steps():
    saver = CheckpointSaver(every_steps=3)
    assert [step for step in range(6) if saver.is_due(step)] == [3, 4, 5]
    saver.begin(3, lambda: None)
    saver.wait()
    assert (saver.saved_step, [step for step in range(3, 8) if saver.is_due(step)]) == (3, [6, 7])


def test_by_default_writing_takes_a_fixed_share_of_the_time():
    clock = Clock()
    saver = CheckpointSaver(every_steps=None, clock=clock)
    writing_s = 0.0
    for step in range(1, 2000):
        clock.now += 1.0
        if saver.is_due(step):
            saver.begin(step, clock.takes(2.0))
            saver.wait()
            writing_s += 2.0
    assert 0.9 * SHARE < writing_s / clock.now < 1.1 * SHARE


def test_unsaved_steps_are_bounded_also_if_writing_is_slow():
    clock = Clock()
    saver = CheckpointSaver(every_steps=None, clock=clock)
    saver.begin(1, clock.takes(1e6))
    saver.wait()
    assert not saver.is_due(MAX_UNSAVED_STEPS)
    assert saver.is_due(1 + MAX_UNSAVED_STEPS)


def test_a_checkpoint_with_groups_of_long_observations_can_be_read(model_folder, tmp_path):
    """Observations have no limit in bytes, and each of their ids is a line of `state.json`."""

    def group(num_ids):
        sent = msgspec.structs.replace(make_group([[1, 2]], [1.0]), observation_ids=((151_000,) * num_ids,))
        return UnpackedGroup(sent, TokenBatch.from_parts([[1, 2]], [[-5.5, -5.5]]))

    huge, large = group(1 << 19), group(280_000)
    kept = groups_of_start([huge, large, large])
    assert kept == (large.sent, large.sent)
    owner = owner_of(load_policy(boot := make_boot(model_folder, tmp_path)), boot)
    write_checkpoint(tmp_path, state_of(owner, TrainingProgress(step=1, start_groups=kept)), {}, {}, keep=1)
    checkpoint, damaged = newest_usable(tmp_path, owner=owner)
    assert checkpoint.state.start_groups == kept and damaged == []
