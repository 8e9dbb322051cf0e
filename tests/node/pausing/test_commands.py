"""What the commands `pause`, `resume` and `stop` print."""

import pytest

from ftis_node.cli.operate.pause import _end_words
from ftis_node.config.home import Home
from ftis_node.telemetry.status import LearnerStatus, NodeStatus, Status
from ftis_node.workers.durable import complete_folder


@pytest.mark.parametrize(
    ("role", "saved", "words"),
    [
        ("full", 7, "all is saved in"),
        ("full", 6, "of 7 steps only 6 are saved in"),
        ("learner", 0, "of 7 steps only 0 are saved in"),
        ("generator", 0, "all is saved in"),
    ],
)
def test_a_stop_says_that_all_is_saved_only_if_the_last_step_has_a_checkpoint(tmp_path, role, saved, words):
    home = Home(tmp_path)
    home.create()
    home.status.write_bytes(Status(node=NodeStatus(role=role, end="stopped"), learner=LearnerStatus(step=7)).to_json())
    if saved:
        with complete_folder(home.checkpoints / f"step-{saved:08d}"):
            pass
    assert _end_words(home).startswith(f"stopped: {words} {tmp_path}")


def test_a_stop_of_a_home_without_a_status_claims_nothing(tmp_path):
    assert "saved is unknown" in _end_words(Home(tmp_path))
