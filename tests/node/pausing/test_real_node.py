"""A real node that is paused, stopped, started again and resumed by the commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.node.support import ANY_PORT, RunningNode, started, write_manifest

START_S = 120.0


def command(*words: str, home: Path) -> str:
    """Run `ftis-node WORDS --home HOME` and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "ftis_node", *words, "--home", str(home)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def workers(node: RunningNode) -> list[int]:
    """Return the resident bytes of each worker process."""
    processes = [each for each in node.processes() if "--endpoint" in each.cmdline()]
    return [each.memory_info().rss for each in processes]


def paused(node: RunningNode) -> bool:
    return bool(node.status()["pause"]["in_effect"])


@pytest.mark.timeout(300)
def test_a_paused_node_frees_its_memory_and_repeats_nothing_afterwards(tmp_path, tiny_models):
    home, run = tmp_path / "node", write_manifest(tmp_path / "run.toml", foreign_wait_s=0.5)
    join = ("join", "--model", str(tiny_models["s"]), "--run", str(run), "--listen", ANY_PORT)
    with started(home, *join) as node:
        node.wait_for(lambda: len(node.events("step")) >= 2, timeout_s=START_S)
        before = workers(node)
        assert command("pause", "--for", "2h", home=home).startswith("paused until ")
        node.wait_for(lambda: paused(node), timeout_s=START_S)
        assert (len(before), workers(node)) == (2, [])
        assert sum(before) > 300 << 20, "the workers held no model"
        status = node.status()
        states = [status[name]["state"] for name in ("node", "generation", "learner")]
        assert (states, status["health"]["healthy"]) == (["running", "paused", "paused"], True)
        shown = command("status", home=home)
        assert "learning: paused" in shown and "by command" in shown
        num_steps = status["learner"]["step"]
        assert "stopped: all is saved" in command("stop", home=home)
        assert node.wait(timeout_s=10) == 0, node.log.read_text()[-3000:]
    with started(home, *join) as node:
        node.wait_for(lambda: node.status()["node"]["state"] == "running", timeout_s=START_S)
        assert (paused(node), workers(node)) == (True, []), "a restart ended the pause"
        assert command("resume", home=home) == "resumed: the workers load the model\n"
        node.wait_for(lambda: node.status()["learner"]["step"] >= num_steps + 2, timeout_s=START_S)
        command("pause", home=home)
        node.wait_for(lambda: paused(node), timeout_s=START_S)
        num_steps = len(node.events("step"))
        command("resume", home=home)  # in the same process: new workers go on with the saved weights
        node.wait_for(lambda: len(node.events("step")) >= num_steps + 2, timeout_s=START_S)
        assert node.status()["learner"]["restarts"] == node.status()["generation"]["restarts"] == 0
    steps = [event["step"] for event in node.events("step")]
    assert steps == list(range(1, len(steps) + 1)), "a step was lost or repeated"
    numbers = [event["number"] for event in node.events("admitted") if event["own"]]
    assert len(numbers) == len(set(numbers)) and len(set(numbers)) >= 4 * len(steps)
    taken = [event["group"] for event in node.events("taken")]
    assert len(taken) == len(set(taken)), "a group was used twice"
    assert not node.events("step_lost") and not node.events("generation_failed")
