"""A node ends in order at any time: within ten seconds, without a remaining process or a lost group."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from ftis_node.swarm.sequence import epoch_base, epoch_of
from ftis_node.workers.durable import is_complete
from tests.node.support import ANY_PORT, STOP_LIMIT_S, RunningNode, started, write_manifest
from tests.node.training.test_tracking import curve

START_S = 120.0
ROOT = Path(__file__).parents[2]
STILL_WRITING = "which is being written; ctrl-C again ends the node"


@pytest.fixture
def join(tmp_path: Path, tiny_models: Mapping[str, Path]) -> tuple[str, ...]:
    """Return the arguments of a node that works alone and waits for no peer."""
    run = write_manifest(tmp_path / "run.toml", foreign_wait_s=0.5)
    arguments = ("--run", str(run), "--listen", ANY_PORT, "--track", "tensorboard")
    return ("join", "--model", str(tiny_models["s"]), *arguments)


def _while_starting(node: RunningNode) -> object:
    return node.events("start")


def _while_loading(node: RunningNode) -> object:
    return len(node.processes()) > 1


def _while_generating(node: RunningNode) -> object:
    return node.events("admitted") and not node.events("taken")


def _while_training(node: RunningNode) -> object:
    return len(node.events("step")) >= 2 and len(node.events("taken")) > 4 * len(node.events("step"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", [_while_starting, _while_loading, _while_generating, _while_training])
def test_sigterm_at_any_moment_ends_the_node_in_order(
    tmp_path: Path, join: tuple[str, ...], moment: Callable[[RunningNode], object]
) -> None:
    home = tmp_path / "node"
    with started(home, *join) as node:
        node.wait_for(lambda: moment(node), timeout_s=START_S)
        assert node.stop() < STOP_LIMIT_S
        assert node.process.returncode == 0, node.log.read_text()[-3000:]
        assert not (home / "run").exists(), "sockets are left"
        steps = [event["step"] for event in node.events("step")]
    if not steps:
        return
    admitted = {event["group"] for event in node.events("admitted")}
    with started(home, *join, "--steps", str(steps[-1] + 2)) as again:
        assert again.wait(timeout_s=START_S) == 0, again.log.read_text()[-3000:]
    all_steps = [event["step"] for event in again.events("step")]
    assert all_steps == list(range(1, steps[-1] + 3)), "did not resume at its step, or logged a step twice"
    evaluated = [event["step"] for event in again.events("eval")]
    assert [step for step, _ in curve(again, "learner/loss")] == all_steps, "the curves miss a step"
    assert [step for step, _ in curve(again, "eval/arithmetic/pass_at_1")] == evaluated
    tracked = [event["tracked"]["tensorboard"] for event in again.events("stop")]
    assert sum(counts["written"] for counts in tracked) == len(all_steps) + len(evaluated)
    assert [(counts["failed"], counts["dropped"]) for counts in tracked] == [(0, 0), (0, 0)]
    used = [event["group"] for event in again.events("taken")]
    assert len(used) == len(set(used)) or "ready again" in again.log.read_text(), "a group was used twice"
    assert set(used[-8:]) & admitted, "no group from before the restart was used"


def _stopping(node: RunningNode) -> dict[str, Any] | None:
    """Return the node's section of its status if it reports the wait for a checkpoint; at most one second old."""
    section: dict[str, Any] = node.status()["node"]
    return section if section["state"] == "stopping" and "checkpoint" in section["waits_for"] else None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("has_second_signal", [False, True])
def test_a_checkpoint_that_takes_longer_than_ten_seconds_is_written_unless_a_second_signal_comes(
    tmp_path: Path, join: tuple[str, ...], has_second_signal: bool
) -> None:
    """A periodic checkpoint is due only after step 1000, so the stop writes the only one."""
    home = tmp_path / "node"
    save_s = 300.0 if has_second_signal else 12.0
    slow = {"SLOW_SAVE_S": str(save_s), "PYTHONPATH": str(ROOT), "FTIS_LEARNER__CHECKPOINT_EVERY_STEPS": "1000"}
    with started(home, *join, module="tests.node.slow_save", **slow) as node:
        node.wait_for(lambda: len(node.events("step")) >= 2, timeout_s=START_S)
        family = node.processes()
        os.kill(node.process.pid, signal.SIGTERM)
        node.wait_for(lambda: STILL_WRITING in node.log.read_text(), timeout_s=START_S)
        stopping = node.wait_for(lambda: _stopping(node), timeout_s=5.0)
        assert stopping["waits_for"].startswith("the checkpoint of step ")
        if has_second_signal:
            os.kill(node.process.pid, signal.SIGINT)
        assert node.wait(timeout_s=START_S) == has_second_signal, node.log.read_text()[-3000:]
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive, f"left running: {[process.cmdline() for process in alive]}"
        steps = [event["step"] for event in node.events("step")]
        assert has_second_signal or node.status()["node"]["end"] == "stopped"
    log = node.log.read_text()
    assert ("SIGINT: ended without waiting for the checkpoint of step" in log) == has_second_signal
    saved = [path.name for path in (home / "checkpoints").glob("step-*") if is_complete(path)]
    # the learner may complete a step whose report no longer reaches the daemon
    last = [[f"step-{step:08d}"] for step in (steps[-1], steps[-1] + 1)]
    assert saved == [] if has_second_signal else saved in last
    assert not [line for line in log.splitlines() if "terminating" in line]


@pytest.mark.timeout(300)
def test_all_processes_end_with_a_killed_daemon_and_the_next_start_resumes(
    tmp_path: Path, join: tuple[str, ...]
) -> None:
    home = tmp_path / "node"
    with started(home, *join) as node:
        node.wait_for(lambda: len(node.events("step")) >= 2, timeout_s=START_S)
        family = node.processes()
        assert len(family) >= 4, "daemon, two workers, p2pd"
        os.kill(node.process.pid, signal.SIGKILL)
        node.process.wait()
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive, f"running after their daemon: {[process.cmdline() for process in alive]}"
        before = [event["step"] for event in node.events("step")]
    with started(home, *join, "--steps", str(before[-1] + 2)) as again:
        assert again.wait(timeout_s=START_S) == 0, again.log.read_text()[-3000:]
    steps = [event["step"] for event in again.events("step")]
    assert steps[-1] == before[-1] + 2
    assert sorted(set(steps)) == list(range(1, steps[-1] + 1))


@pytest.mark.timeout(300)
def test_a_killed_worker_loses_no_group(tmp_path: Path, join: tuple[str, ...]) -> None:
    with started(tmp_path / "node", *join, "--steps", "6") as node:
        node.wait_for(lambda: len(node.events("step")) >= 1, timeout_s=START_S)
        workers = [
            process
            for process in node.processes()
            if any(argument.endswith(".worker") for argument in process.cmdline())
        ]
        assert len(workers) == 2
        for worker in workers:
            worker.kill()
        assert node.wait(timeout_s=START_S) == 0, node.log.read_text()[-3000:]
    assert "the checkpoint of step 6" in node.log.read_text(), "not saved before the workers ended"
    status = node.status()
    assert status["generation"]["restarts"] == 1
    assert status["learner"]["restarts"] == 1
    assert (status["node"]["state"], status["swarm"]["state"]) == ("stopped", "stopped")
    saved = json.loads((tmp_path / "node" / "status.json").read_text())
    assert saved["swarm"]["state"] == "standalone", "not the state of the running node"
    assert status["learner"]["step"] == 6
    assert status["learner"]["own_groups"] == 6 * 4
    numbers = [event["number"] for event in node.events("announced")]
    first = epoch_base(epoch_of(numbers[0])) + 1
    assert numbers == list(range(first, first + len(numbers))), "a number is missing or was used twice"
