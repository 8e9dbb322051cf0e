"""Process limits that a node sets at its start, and that its child processes inherit: open files, priority, threads."""

from __future__ import annotations

import logging
import os
import resource
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from ftis_node.config.limits import LimitsSection
from ftis_node.errors import MachineError
from ftis_node.telemetry.log import RateLimitedLog, is_out_of_files

log = logging.getLogger(__name__)
MIN_OPEN_FILES = 512  # daemon and p2pd: one or two connections per peer and stream, and the home's files
MIN_THREADS = 2  # of the daemon's libraries; usually a quarter of the cores
THREAD_VARIABLES = ("OMP_NUM_THREADS", "GOMAXPROCS")  # numpy and torch; p2pd
MANY_OPEN_FILES = 1 << 16  # more has no use, and some programs iterate over all possible descriptors


class OpenFiles(NamedTuple):
    """The soft and hard limit of open files (RLIMIT_NOFILE)."""

    soft: int
    hard: int

    @property
    def reachable(self) -> int:
        """Return the soft limit that a node sets."""
        return max(self.soft, min(self.hard, MANY_OPEN_FILES))


def open_files() -> OpenFiles:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MANY_OPEN_FILES
    return OpenFiles(*(most if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard)))


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def allow_open_files() -> None:
    """Raise the soft limit to the hard one, at most MANY_OPEN_FILES. Raise MachineError if that is too few."""
    found = open_files()
    if found.reachable < MIN_OPEN_FILES:
        raise MachineError(
            f"a process may open {found.reachable} files here, {MIN_OPEN_FILES} are needed: `ulimit -Hn` (LimitNOFILE "
            "of a systemd unit, --ulimit nofile of a container) sets it"
        )
    if found.reachable > found.soft:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (found.reachable, hard))


async def skip_without_files(work: Callable[[], Awaitable[object]], shortage: RateLimitedLog) -> None:
    """Await `work`; count a lack of file descriptors and log it once a minute. Raise all other errors."""
    try:
        await work()
    except (OSError, sqlite3.OperationalError) as error:
        if not is_out_of_files(error):
            raise
        if shortage.is_due():
            log.warning(
                "no file can be opened (%s; limit %d, %d times so far): this work is skipped once",
                *(error, open_files().soft, shortage.count),
            )


def apply_limits(limits: LimitsSection) -> None:
    """Set the limits. Call this before any process or thread starts, because they inherit the limits.

    Raise MachineError if too few files may be opened.
    """
    allow_open_files()
    os.setpriority(os.PRIO_PROCESS, 0, max(limits.nice, os.getpriority(os.PRIO_PROCESS, 0)))
    for name in THREAD_VARIABLES:  # the workers get separate values
        os.environ.setdefault(name, str(max(MIN_THREADS, (os.cpu_count() or MIN_THREADS) // 4)))
    if torch := sys.modules.get("torch"):  # it has read the environment already
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
