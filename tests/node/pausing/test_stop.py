"""`ftis-node stop` ends the process that holds the home, and none of another container that has its number.

The memory that `status` shows is that of the same process.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ftis_node.cli.app import run
from ftis_node.cli.operate.pause import _end_words
from ftis_node.config.home import Home
from ftis_node.dashboard.watcher import read_machine
from ftis_node.telemetry.status import LearnerStatus, NodeStatus, Status
from ftis_node.workers.durable import complete_folder

HOLDER = """
import fcntl, os, sys, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.write((sys.argv[2] or str(os.getpid())) + "\\n")
lock.flush()
print(flush=True)
time.sleep(120)
"""
NO_PROCESS = (1 << 22) + 1  # above the largest process id of Linux
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a holder of a lock, which has its own process id or another one in it."""
    with ExitStack() as running:

        def start(lock: Path, pid: int | str = "") -> subprocess.Popen[bytes]:
            process = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock), str(pid)], stdout=subprocess.PIPE)
            running.enter_context(process)
            running.callback(process.kill)
            process.stdout.readline()
            return process

        yield start


def test_the_holder_ends(start, tmp_path, capsys):
    holder = start(tmp_path / "lock")
    assert read_machine(Home(tmp_path)).num_processes == 1
    assert run(["stop", "--home", str(tmp_path)]) == 0, capsys.readouterr().err
    assert holder.wait(10) == -15


def test_a_node_of_another_container_is_refused(start, tmp_path, capsys):
    other = start(tmp_path / "other")
    for name, pid in (("same", other.pid), ("none", NO_PROCESS)):
        (home := tmp_path / name).mkdir()
        start(home / "lock", pid)
        assert read_machine(Home(home)).num_processes == 0
        assert run(["stop", "--home", str(home)]) == 2
        line = f"ftis-node: the node in {home} runs in another container: stop it there, or stop the container\n"
        assert capsys.readouterr().err == line
    assert other.poll() is None, "another process was ended"


@pytest.mark.parametrize(
    ("role", "saved", "words"),
    [
        ("full", 7, "all is saved in"), ("full", 6, "of 7 steps only 6 are saved in"),
        ("learner", 0, "of 7 steps only 0 are saved in"), ("generator", 0, "all is saved in"),
    ],
)  # fmt: skip
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
