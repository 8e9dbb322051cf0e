"""A node ends in order at any time: within ten seconds, without a remaining process or a lost group."""

import os
import signal
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
def join(tmp_path, tiny_models):
    """Return the arguments of a node that works alone and waits for no peer."""
    run = write_manifest(tmp_path / "run.toml", foreign_wait_s=0.5)
    arguments = ("--run", str(run), "--listen", ANY_PORT, "--track", "tensorboard")
    return ("join", "--model", str(tiny_models["s"]), *arguments)


def _while_loading(node: RunningNode) -> object:
    return len(node.processes()) > 1


def _while_training(node: RunningNode) -> object:
    return len(node.events("step")) >= 2 and len(node.events("taken")) > 4 * len(node.events("step"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("moment", "is_hang_up"), [(_while_loading, False), (_while_training, True)])
def test_sigterm_at_any_moment_ends_the_node_in_order(tmp_path, join, moment, is_hang_up):
    """If a terminal closes, the kernel sends SIGHUP to each process of the terminal's process group.

    `env` restores what SIGHUP does, because the test may run under `nohup`.
    """
    home = tmp_path / "node"
    with started(home, *join, on=("env", "--default-signal=HUP", "setsid")) as node:
        node.wait_for(lambda: moment(node), timeout_s=START_S)
        if is_hang_up:
            family = node.processes()
            os.killpg(node.process.pid, signal.SIGHUP)
            assert node.wait(timeout_s=STOP_LIMIT_S) == 0, node.log.read_text()[-3000:]
            _, alive = psutil.wait_procs(family, timeout=3)
            assert not alive, f"left running: {[process.cmdline() for process in alive]}"
        else:
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
def test_a_checkpoint_that_takes_longer_than_ten_seconds_is_written(tmp_path, join):
    """A periodic checkpoint is due only after step 1000, so the stop writes the only one."""
    home = tmp_path / "node"
    slow = {"SLOW_SAVE_S": "12", "PYTHONPATH": str(ROOT), "FTIS_LEARNER__CHECKPOINT_EVERY_STEPS": "1000"}
    with started(home, *join, module="tests.node.slow_save", **slow) as node:
        node.wait_for(lambda: node.events("step"), timeout_s=START_S)
        family = node.processes()
        os.kill(node.process.pid, signal.SIGTERM)
        node.wait_for(lambda: STILL_WRITING in node.log.read_text(), timeout_s=START_S)
        stopping = node.wait_for(lambda: _stopping(node), timeout_s=5.0)
        assert stopping["waits_for"].startswith("the checkpoint of step ")
        assert node.wait(timeout_s=START_S) == 0, node.log.read_text()[-3000:]
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive, f"left running: {[process.cmdline() for process in alive]}"
        last = node.events("step")[-1]["step"]
        assert node.status()["node"]["end"] == "stopped"
    saved = [path.name for path in (home / "checkpoints").glob("step-*") if is_complete(path)]
    # the learner may complete a step whose report no longer reaches the daemon
    assert saved in [[f"step-{step:08d}"] for step in (last, last + 1)]
    assert "terminating" not in node.log.read_text()


@pytest.mark.timeout(300)
def test_killed_workers_lose_no_group_and_all_processes_end_with_a_killed_daemon(tmp_path, join):
    home = tmp_path / "node"
    with started(home, *join) as node:
        node.wait_for(lambda: node.events("step"), timeout_s=START_S)
        workers = [each for each in node.processes() if any(word.endswith(".worker") for word in each.cmdline())]
        assert len(workers) == 2
        for worker in workers:
            worker.kill()
        num_steps = len(node.events("step"))
        node.wait_for(lambda: len(node.events("step")) >= num_steps + 2, timeout_s=START_S)
        status = node.status()
        assert (status["generation"]["restarts"], status["learner"]["restarts"]) == (1, 1)
        assert status["learner"]["own_groups"] == status["learner"]["step"] * 4
        numbers = [event["number"] for event in node.events("announced")]
        first = epoch_base(epoch_of(numbers[0])) + 1
        assert numbers == list(range(first, first + len(numbers))), "a number is missing or was used twice"
        family = node.processes()
        assert len(family) >= 4, "daemon, two workers, p2pd"
        os.kill(node.process.pid, signal.SIGKILL)
        node.process.wait()
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive, f"running after their daemon: {[process.cmdline() for process in alive]}"
        last = node.events("step")[-1]["step"]
    with started(home, *join, "--steps", str(last + 2)) as again:
        assert again.wait(timeout_s=START_S) == 0, again.log.read_text()[-3000:]
    steps = [event["step"] for event in again.events("step")]
    assert (steps[-1], sorted(set(steps))) == (last + 2, list(range(1, steps[-1] + 1)))
    status = again.status()
    assert (status["node"]["state"], status["swarm"]["state"]) == ("stopped", "stopped")
