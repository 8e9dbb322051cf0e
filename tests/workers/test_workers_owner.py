"""A worker does not outlive its owner, however the owner ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from worker_support import PYTHON_PATH

if TYPE_CHECKING:
    from pathlib import Path

OWNER = """
import asyncio, sys
from pathlib import Path
from echo_worker import Echo, EchoBoot, EchoReply
from ftis_node.workers.preload import WorkerSpec
from ftis_node.workers.supervisor import Supervisor

async def main(folder):
    supervisor = Supervisor(WorkerSpec(name="echo", module="echo_worker", boot=EchoBoot(trace=str(folder)),
                                       sockets_dir=folder, log_path=folder / "echo.log"))
    await supervisor.start()
    sys.stdout.write(f"{supervisor.pid}\\n")
    sys.stdout.flush()
    await asyncio.sleep(60)

asyncio.run(main(Path(sys.argv[1])))
"""

# Stands between owner and worker, as torchrun does, so that the worker's parent is not its owner.
BESIDE = """
import os, sys, time
from ftis_node.workers.liveness import die_with_owner
die_with_owner(int(sys.argv[1]))
sys.stdout.write("watching\\n")
sys.stdout.flush()
time.sleep(60)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PYTHON_PATH}


def seconds_until_gone(pid: int, *, at_most_s: float) -> float:
    begun = time.monotonic()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() - begun > at_most_s:
            os.kill(pid, signal.SIGKILL)
            pytest.fail(f"process {pid} outlived its owner by {at_most_s} s")
        time.sleep(0.02)
    return time.monotonic() - begun


def test_a_worker_dies_with_a_killed_daemon(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment()
    ) as owner:
        assert owner.stdout is not None
        worker_pid = int(owner.stdout.readline())
        assert psutil.pid_exists(worker_pid)
        owner.send_signal(signal.SIGKILL)
        seconds_until_gone(worker_pid, at_most_s=20.0)


def test_a_process_watches_an_owner_that_is_not_its_parent() -> None:
    with subprocess.Popen(["sleep", "60"]) as owner:
        watcher = subprocess.Popen(
            [sys.executable, "-c", BESIDE, str(owner.pid)], stdout=subprocess.PIPE, text=True, env=environment()
        )
        with watcher:
            assert watcher.stdout is not None
            assert watcher.stdout.readline() == "watching\n"
            assert watcher.poll() is None
            owner.kill()
            seconds_until_gone(watcher.pid, at_most_s=20.0)
