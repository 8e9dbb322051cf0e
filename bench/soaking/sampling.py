"""Samples of a soak, every few seconds and from outside: processes, files, rows, and the daemon's response time.

A point is a value of one part of one node. Processes are identified by their command, so a restarted worker continues
as the same part. `lives` counts the processes that a part has had.
"""

from __future__ import annotations

import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import psutil

from soaking.swarm import Node

ROLES = {
    "generation": "ftis_node.generation.worker",
    "learner": "ftis_node.learner.worker",
    "p2pd": "p2pd",
    "scoring": "scoring",
    "tracker": "resource_tracker",
}
TABLES = {"replay": ("groups", "forgotten", "totals"), "peers": ("peers",)}
LAGS = {"event_loop_lag_s": "mean", "event_loop_lag_longest_s": "longest"}  # of the last minute
MEBI = 1 << 20
MACHINE = "machine"
LOOP_ROUNDS = 100_000


class Point(NamedTuple):
    """One figure. `minute` counts from the start of the soak, and `quantity` contains the unit."""

    minute: float
    node: str
    quantity: str
    part: str
    value: float


class Sampler:
    """A sampler of one node, with the processes that the node has had."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lives: dict[str, set[int]] = defaultdict(set)
        self._cpu_s: dict[int, float] = {}
        self._sampled_at = 0.0

    def sample(self, minute: float) -> list[Point]:
        """Return all current figures of the node. A process that ends meanwhile is skipped."""
        figures = [*self._processes(), *self._disk(), *self._rows()]
        if self._node.has_port:
            figures += self._answers()
        return [Point(minute, self._node.name, *figure) for figure in figures]

    def _processes(self) -> Iterator[tuple[str, str, float]]:
        sums: dict[tuple[str, str], float] = defaultdict(float)
        now = time.monotonic()
        since_s, self._sampled_at = now - self._sampled_at, now
        for process in self._node.processes():
            try:
                role = role_of(process, daemon=self._node.child.process.pid)
                with process.oneshot():
                    memory, cpu = process.memory_full_info(), process.cpu_times()
                    seen = {"rss_mib": memory.rss / MEBI, "uss_mib": memory.uss / MEBI}
                    seen |= {"descriptors": process.num_fds(), "threads": process.num_threads()}
            except psutil.NoSuchProcess:
                continue
            self._lives[role].add(process.pid)
            before, self._cpu_s[process.pid] = self._cpu_s.get(process.pid), cpu.user + cpu.system
            if before is not None:
                seen["cpu_percent"] = 100 * (cpu.user + cpu.system - before) / since_s
            for quantity, value in seen.items():
                sums[quantity, role] += value
        for (quantity, role), value in sums.items():
            yield quantity, role, value
        for role, pids in self._lives.items():
            yield "lives", role, len(pids)

    def _disk(self) -> Iterator[tuple[str, str, float]]:
        """Return the bytes of each file or folder of the home. Files of SQLite and rotated ones count for the first."""
        sums: dict[str, float] = defaultdict(float)
        for path in _listed(self._node.home.root):
            sums[path.name.split(".")[0]] += disk_bytes(path) / MEBI
        for name, value in sums.items():
            yield "disk_mib", name, value

    def _rows(self) -> Iterator[tuple[str, str, float]]:
        for file, tables in TABLES.items():
            path = self._node.home.root / f"{file}.sqlite"
            if not path.exists():
                continue
            with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=10.0)) as db:
                for table in tables:
                    yield "rows", f"{file}.{table}", db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]

    def _answers(self) -> Iterator[tuple[str, str, float]]:
        started = time.monotonic()
        status = self._node.status()
        yield "answer_ms", "status", 1e3 * (time.monotonic() - started)
        metrics = self._node.ask("/metrics")
        for name, part in LAGS.items():
            if (lag_s := status["health"].get(name)) is not None:
                yield "lag_ms", part, 1e3 * lag_s
        others = {key: part for key, part in status.items() if key != "eval"}  # whose length has a separate bound
        yield "answer_bytes", "status", len(str(others))
        yield "answer_bytes", "metrics", len(metrics)
        yield "done", "steps", status["learner"]["step"]
        yield "done", "own groups", status["generation"]["groups_made"]
        yield "done", "foreign groups", status["swarm"]["groups_received"]
        yield "done", "refused groups", sum(status["swarm"]["groups_refused"].values())


def sample_machine(minute: float) -> list[Point]:
    """Return the machine's speed: the processor time of a constant loop, and the time that the host took away.

    The latter is the fraction of the time since the last call that the host of a virtual machine gave to others (Linux;
    elsewhere 0).
    """
    began, total = time.thread_time(), 0
    for number in range(LOOP_ROUNDS):
        total += number
    loop_ms = 1e3 * (time.thread_time() - began)
    stolen = getattr(psutil.cpu_times_percent(), "steal", 0.0)
    return [Point(minute, MACHINE, "loop_ms", "", loop_ms), Point(minute, MACHINE, "stolen_percent", "", stolen)]


def role_of(process: psutil.Process, *, daemon: int) -> str:
    """Return the role of a process of a node. Raises psutil.NoSuchProcess if it has ended."""
    if process.pid == daemon:
        return "daemon"
    command = " ".join(process.cmdline())
    return next((role for role, word in ROLES.items() if word in command), "other")


def disk_bytes(path: Path) -> int:
    """Return the disk use of a file or folder. Files that are deleted meanwhile do not count."""
    if path.is_dir() and not path.is_symlink():
        return sum(disk_bytes(entry) for entry in _listed(path))
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []
