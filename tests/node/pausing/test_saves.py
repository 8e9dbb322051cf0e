"""Real nodes and the save of a pause: one that a stop meets halfway, and one that is lost."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from ftis_node.config.home import Home
from ftis_node.workers.durable import newest_complete
from tests.node.pausing.test_real_node import START_S, command, paused
from tests.node.support import ANY_PORT, started, write_manifest

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(300)
def test_a_stop_during_the_save_of_a_pause_waits_for_it(tmp_path, tiny_models):
    """A periodic checkpoint is due only after step 1000, so the pause writes the only one."""
    home, run = tmp_path / "node", write_manifest(tmp_path / "run.toml", foreign_wait_s=0.5)
    join = ("join", "--model", str(tiny_models["s"]), "--run", str(run), "--listen", ANY_PORT)
    slow = {"SLOW_SAVE_S": "12", "PYTHONPATH": str(ROOT), "FTIS_LEARNER__CHECKPOINT_EVERY_STEPS": "1000"}
    with started(home, *join, module="tests.node.slow_save", **slow) as node:
        node.wait_for(lambda: node.events("step"), timeout_s=START_S)
        command("pause", home=home)
        node.wait_for(lambda: node.status()["generation"]["state"] == "paused", timeout_s=START_S)
        time.sleep(2.0)  # the learner ends after the generator
        assert not paused(node), "the learner has saved before the stop"
        assert "stopped: all is saved" in command("stop", home=home)
        assert node.wait(timeout_s=10) == 0, node.log.read_text()[-3000:]
    newest = newest_complete(Home(home).checkpoints, "step-")
    assert newest is not None and int(newest.name.removeprefix("step-")) >= node.events("step")[-1]["step"]


@pytest.mark.timeout(300)
def test_a_node_whose_last_steps_are_lost_in_a_pause_trains_on(tmp_path, tiny_models):
    home, run = tmp_path / "node", write_manifest(tmp_path / "run.toml", foreign_wait_s=0.5)
    join = ("join", "--model", str(tiny_models["s"]), "--run", str(run), "--listen", ANY_PORT)
    with started(home, *join) as node:
        node.wait_for(lambda: len(node.events("step")) >= 3, timeout_s=START_S)
        command("pause", home=home)
        node.wait_for(lambda: paused(node), timeout_s=START_S)
        lost = newest_complete(Home(home).checkpoints, "step-")
        assert lost is not None
        num_done = int(lost.name.removeprefix("step-"))
        shutil.rmtree(lost)
        rest = newest_complete(Home(home).checkpoints, "step-")
        num_saved = 0 if rest is None else int(rest.name.removeprefix("step-"))
        command("resume", home=home)
        node.wait_for(lambda: node.events("step")[-1]["step"] >= num_done + 2, timeout_s=START_S)
        status = node.status()
        assert status["learner"]["restarts"] == status["generation"]["restarts"] == 0
    steps = [event["step"] for event in node.events("step")]
    again = steps[steps.index(num_done) + 1 :]
    assert again[: num_done - num_saved + 1] == list(range(num_saved + 1, num_done + 2)), "not from its checkpoint"
