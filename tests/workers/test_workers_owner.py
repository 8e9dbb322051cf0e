"""A worker ends with its owner, even if the owner is killed."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
from worker_support import PYTHON_PATH, has_ended

from tests.waiting import wait_until

OWNER = """
import asyncio, sys
from pathlib import Path
from echo_worker import Echo, EchoBoot, EchoReply
from ftis_node.workers.process import WorkerSpec
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

# A process whose parent is not its owner, like a rank under torchrun.
NOT_A_CHILD = """
import os, sys, time
from ftis_node.workers.liveness import die_with_owner
die_with_owner(int(sys.argv[1]))
sys.stdout.write("watching\\n")
sys.stdout.flush()
time.sleep(60)
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHON_PATH}


def wait_for_end(pid: int) -> None:
    """Return when the process has ended. If it does not end, kill it and raise AssertionError."""
    try:
        wait_until(lambda: has_ended(pid), within_s=20.0)
    except AssertionError:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise


def test_a_worker_dies_with_a_killed_daemon(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as owner:
        worker_pid = int(owner.stdout.readline())
        assert psutil.pid_exists(worker_pid)
        owner.send_signal(signal.SIGKILL)
        wait_for_end(worker_pid)


def test_a_process_watches_an_owner_that_is_not_its_parent():
    with subprocess.Popen(["sleep", "60"]) as owner:
        watcher = subprocess.Popen(
            [sys.executable, "-c", NOT_A_CHILD, str(owner.pid)], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        with watcher:
            assert watcher.stdout.readline() == "watching\n"
            assert watcher.poll() is None
            owner.kill()
            wait_for_end(watcher.pid)
