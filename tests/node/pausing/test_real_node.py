"""A real node that is paused, stopped, started in the background, joined by a friend and resumed, by the commands."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ftis_node.cli.app import run as main
from ftis_node.config.home import Home
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
    processes = [each for each in node.processes() if "--endpoint" in each.cmdline()]
    return [each.memory_info().rss for each in processes]


def paused(node: RunningNode) -> bool:
    return bool(node.status()["pause"]["in_effect"])


def until(condition: Callable[[], Any], *, timeout_s: float = START_S) -> None:
    """Wait until `condition` is true, for a node that is no process of this test."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.1)


@contextmanager
def detached(home: Path, *arguments: str) -> Iterator[str]:
    """Run `ftis-node join --detach` and yield what it prints; kill the node at the end if it still runs."""
    try:
        yield command(*arguments, "--detach", home=home)
    finally:
        if (pid := Home(home).holder()) is not None:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(400)
def test_a_paused_node_frees_its_memory_serves_an_invited_friend_and_repeats_nothing(tmp_path, tiny_models):
    home, run = tmp_path / "node", write_manifest(tmp_path / "run.toml", foreign_wait_s=0.5)
    secret = tmp_path / "secret"
    secret.write_bytes(b"5e" * 32)
    secret.chmod(0o600)
    home.mkdir()
    (home / "node.toml").write_text(f'engine = "torch"\n[swarm]\nsecret_file = "{secret}"\n')
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
    with detached(home, *join) as printed:  # this start holds no model: the pause goes on
        assert "it runs:   ftis-node status --home" in printed
        assert paused(node) and node.status()["generation"]["state"] == "paused", "a restart ended the pause"
        assert main(["join", "--detach", *join[1:], "--home", str(home)]) == 2, "two nodes on one home"
        invitation = json.loads(command("invite", "--json", home=home))
        assert (invitation["has_secret"], len(invitation["addresses"])) == (True, 1)
        friend = ("join", invitation["invitation"], "--model", str(tiny_models["m"]), "--listen", ANY_PORT)
        with started(tmp_path / "friend", *friend) as other:
            other.wait_for(lambda: [event for event in other.events("admitted") if not event["own"]], timeout_s=START_S)
            assert paused(node), "the friend got its groups after the pause"
        assert Home(tmp_path / "friend").swarm_secret.read_text() == secret.read_text()
        assert command("resume", home=home) == "resumed: the workers load the model\n"
        until(lambda: node.status()["learner"]["step"] >= num_steps + 2)
        command("pause", home=home)
        until(lambda: paused(node))
        num_steps = len(node.events("step"))
        command("resume", home=home)  # in the same process: new workers go on with the saved weights
        until(lambda: len(node.events("step")) >= num_steps + 2)
        assert node.status()["learner"]["restarts"] == node.status()["generation"]["restarts"] == 0
        assert "stopped: all is saved" in command("stop", home=home)
    steps = [event["step"] for event in node.events("step")]
    assert steps == list(range(1, len(steps) + 1)), "a step was lost or repeated"
    numbers = [event["number"] for event in node.events("admitted") if event["own"]]
    assert len(numbers) == len(set(numbers)) and len(set(numbers)) >= 4 * len(steps)
    taken = [event["group"] for event in node.events("taken")]
    assert len(taken) == len(set(taken)), "a group was used twice"
    assert not node.events("step_lost") and not node.events("generation_failed")
