"""The saver of checkpoints: when one is due, writing during later steps, and failed writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ftis_node.learner.checkpoint.saving import MAX_UNSAVED_STEPS, SHARE, CheckpointSaver


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
    assert saver.saved_step == 3
    assert [step for step in range(3, 8) if saver.is_due(step)] == [6, 7]


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


def test_a_failed_write_is_reported_once_and_the_step_is_due_again():
    def refuse():
        raise OSError(28, "No space left on device")

    saver = CheckpointSaver(every_steps=None)
    saver.begin(1, refuse)
    saver.pause(lambda: None)
    with pytest.raises(OSError, match="No space left"):
        saver.raise_failure()
    saver.raise_failure()
    assert saver.saved_step == 0
    assert saver.is_due(1)
    saver.begin(1, lambda: None)
    saver.wait()
    assert saver.saved_step == 1
