"""The buffer after a restart: the checkpoint decides which groups are trained, and no acknowledged group is lost."""

import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest

from ftis_node.replay.buffer import MAX_FAILED_STEPS, ReplayBuffer
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.reader import ReplayReader
from tests.replay.test_buffer import ANN, ME, accepted, fill


def test_groups_of_steps_after_the_checkpoint_are_ready_again(path, buffer, reader):
    fill(buffer, own=3, ann=3)
    for step in (1, 2, 3):
        buffer.take(step, own=1, foreign=1)
        if step < 3:
            buffer.release_step(step, ReleaseReason.TRAINED)
    buffer.close()
    resumed = ReplayBuffer(path)
    assert resumed.reconcile(1) == 4, "the checkpoint has step 1 only; step 2 was trained and step 3 taken"
    assert reader.ready_counts() == (2, 2)
    assert (reader.figures().trained_own, len(resumed.take(2, own=9, foreign=9).groups)) == (1, 4)
    assert resumed.reconcile(2) == 0, "the checkpoint has step 2, so its groups are trained"
    assert reader.figures().trained_foreign == 3
    resumed.close()


def test_groups_on_which_the_learner_fails_repeatedly_are_released(path):
    with closing(ReplayBuffer(path)) as first:
        fill(first, own=2, ann=1)
    for _ in range(MAX_FAILED_STEPS):  # each failure ends the node
        with closing(ReplayBuffer(path)) as buffer:
            assert buffer.release_poisoned() == []
            taken = {group.id for group in buffer.take(1, own=1, foreign=1).groups}
            buffer.note_failed(1)
            assert buffer.release_poisoned() == [], "the checkpoint may show that they were trained"
            buffer.reconcile(0)
    with closing(ReplayBuffer(path)) as buffer, closing(ReplayReader(path)) as reader:
        assert (set(buffer.release_poisoned()), len(taken)) == (taken, 2)
        assert reader.ready_counts() == (1, 0), "the group that was in none of these steps stays ready"
        assert reader.figures().released == {"poisoned": 2}


def test_groups_of_a_saved_step_are_trained_despite_failures(buffer, reader):
    fill(buffer, own=1)
    buffer.take(1, own=1, foreign=0)
    for _ in range(MAX_FAILED_STEPS):
        buffer.note_failed(1)
    buffer.reconcile(1)
    assert (buffer.release_poisoned(), reader.figures().released) == ([], {"trained": 1})


@pytest.mark.parametrize("every_steps", [1, 3])
@pytest.mark.parametrize("last_stage", ["taken", "trained", "saved", "released"])
def test_each_group_is_trained_once_if_the_node_dies_at_any_stage(path, every_steps, last_stage):
    """The groups of the newest checkpoint are trained; later steps of the learner are lost with the process."""
    buffer = ReplayBuffer(path)
    fill(buffer, own=12, ann=12)
    saved: list[list[bytes]] = []  # the groups of each step that the newest checkpoint holds
    weights: list[list[bytes]] = []
    stages = ["taken", "trained", "saved", "released"]
    for attempt in range(1, 40):
        step, has_died = len(weights) + 1, attempt in {2, 3, 5}
        reached = stages[: stages.index(last_stage) + 1] if has_died else stages
        groups = [group.id for group in buffer.take(step, own=2, foreign=2).groups]
        if not groups:
            break
        if "trained" in reached:
            weights = [*weights, groups]
        if "saved" in reached and step - len(saved) >= every_steps:
            saved = weights
        if "released" in reached:
            buffer.release_step(step, ReleaseReason.TRAINED)
            buffer.prune(max_disk_bytes=1, saved_step=len(saved))
        if has_died:
            buffer.close()
            buffer, weights = ReplayBuffer(path), saved
            buffer.reconcile(len(saved), saved[-1] if saved else [])
    buffer.close()
    trained = [group for groups in weights for group in groups]
    assert len(trained) == len(set(trained)) == 24
    assert attempt > 6


def test_the_buffer_follows_a_checkpoint_that_disagrees(buffer, reader):
    """After a restored backup, the groups of the checkpoint are trained and all others are ready."""
    fill(buffer, own=4)
    first, second = buffer.take(1, own=1, foreign=0).groups[0].id, buffer.take(2, own=1, foreign=0).groups[0].id
    buffer.release_step(1, ReleaseReason.TRAINED)
    buffer.release_step(2, ReleaseReason.TRAINED)
    third, fourth = (group.id for group in buffer.take(3, own=2, foreign=0).groups)
    buffer.reconcile(2)
    assert buffer.reconcile(2, [second]) == 0, "the buffer agrees"
    assert buffer.reconcile(2, [third]) == 1
    assert [group.id for group in buffer.take(3, own=9, foreign=0).groups] == [second, fourth]
    assert buffer.reconcile(3, [fourth, first]) == 1, "named by the checkpoint, under another step in the buffer"
    assert [group.id for group in buffer.take(4, own=9, foreign=0).groups] == [second]
    assert reader.figures().trained_own == 3


def test_a_raised_number_does_not_change_the_position_of_the_prompts(path, buffer):
    for number in (1, 2, 2):
        buffer.admit(accepted(ME, number), own=True)
    buffer.admit(accepted(ANN, 9), own=False)
    buffer.raise_last_number(5_000)
    buffer.raise_last_number(4_000)
    buffer.admit(accepted(ME, 5_001), own=True)
    assert (buffer.last_number(), buffer.prompt_position()) == (5_001, 3)
    buffer.close()
    with closing(ReplayBuffer(path)) as again:
        assert (again.last_number(), again.prompt_position()) == (5_001, 3)


WRITER = """
import sys
from pathlib import Path
from ftis_node.replay.buffer import ReplayBuffer
from tests.replay.test_buffer import ME, accepted
buffer = ReplayBuffer(Path(sys.argv[1]))
for number in range(1, 100000):
    buffer.admit(accepted(ME, number), own=True)
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""


def test_acknowledged_groups_survive_a_kill(path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    acknowledged = 0
    for line in process.stdout:
        acknowledged = int(line)
        if acknowledged == 20:
            os.kill(process.pid, signal.SIGKILL)
            break
    process.wait()
    process.stdout.close()
    with closing(ReplayBuffer(path)) as buffer:
        assert buffer.last_number() >= acknowledged
        assert len(buffer.take(1, own=1000, foreign=0).groups) == buffer.last_number()
