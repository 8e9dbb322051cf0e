"""Shared parts of the tests of `workers`: short time limits, and the import path of the echo worker."""

from pathlib import Path

import psutil

import ftis_node
from ftis_node.backoff import ExponentialBackoff
from ftis_node.workers.liveness import RestartPolicy, Timing
from ftis_node.workers.supervisor import Supervisor

PYTHON_PATH = f"{Path(__file__).parent}:{Path(ftis_node.__file__).parents[1]}"

QUICK = Timing(
    start_grace_s=20.0, heartbeat_every_s=0.1, heartbeat_timeout_s=4.0, stop_grace_s=2.0, terminate_grace_s=0.5
)
PATIENT = RestartPolicy(backoff=ExponentialBackoff(first_s=0.05), max_quick_deaths=3)


def pid_of(supervisor: Supervisor) -> int:
    assert supervisor.pid is not None, "the worker has no process"
    return supervisor.pid


def has_ended(pid: int) -> bool:
    """Return whether no process of that id runs; a zombie has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
