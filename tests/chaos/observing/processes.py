"""Which processes a node has, which outlived it, and what lies about in its folders.

A node's processes are its daemon and everything under it. A process that once was under it, or names its home or its
sockets, and is under it no more, has outlived its time. So has a file with a temporary name that nobody is writing.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import psutil

from ftis_node.config.home import Home
from ftis_node.workers.weight_store import MEMORY_DISK

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

ROLES = {
    "ftis_node.generation.worker": "generation worker",
    "ftis_node.learner.worker": "learner worker",
    "p2pd": "p2pd",
    "EngineCore": "engine core",
}
TEMPORARY_NAMES = ("**/.*.incomplete-*", "**/*.tmp", "**/*.new", "**/*.part", "**/*-journal")
KERNELS_UNIX_SOCKETS = Path("/proc/net/unix")


Identity: TypeAlias = tuple[int, int]


class Watched(Protocol):
    """What is asked of a node: `swarm.SwarmNode` has it."""

    name: str
    home: Path

    @property
    def is_running(self) -> bool:
        """Whether its daemon lives."""

    @property
    def pid(self) -> int:
        """The daemon's process id, or that of its last life."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process; pid and time of birth, in the kernel's ticks since the machine's start, say for ever which.

    A zombie has ended and nobody took note.
    """

    role: str
    pid: int
    born_at: int
    rss_bytes: int = 0
    num_fds: int = 0
    num_threads: int = 0
    is_zombie: bool = False

    @property
    def identity(self) -> Identity:
        """Process ids are used again; this is not."""
        return self.pid, self.born_at


def family_of(node: Watched) -> tuple[Process, ...]:
    """The node's daemon, where it lives, and everything under it."""
    if not node.is_running:
        return ()
    with suppress(psutil.NoSuchProcess):
        daemon = psutil.Process(node.pid)
        members = [daemon, *daemon.children(recursive=True)]
        return tuple(found for member in members if (found := _process(member, daemon_pid=node.pid)) is not None)
    return ()


def strays_of(node: Watched, former: Collection[Process], family: Collection[Process]) -> dict[Identity, str]:
    """What outlived its time, by identity: in words, with its role where that is known."""
    present = {process.identity for process in family}
    strays = {process.identity: f"{process.role} (pid {process.pid})" for process in former if _lives(process)}
    marks = "|".join(re.escape(str(folder)) for folder in (node.home, Home(node.home).sockets))
    names_one = re.compile(f"({marks})(/|$)")
    for process in psutil.process_iter(["pid", "cmdline"]):
        words, pid = process.info["cmdline"] or [], process.info["pid"]
        if any(names_one.search(word) for word in words) and (born_at := _born_at(pid)) is not None:
            strays.setdefault((pid, born_at), " ".join(words)[:120])
    return {identity: words for identity, words in strays.items() if identity not in present}


def leftovers_of(node: Watched) -> dict[tuple[str, int], str]:
    """Files that a dead life may have left, by path and inode: temporary names, sockets that nobody listens on.

    Of a node that does not run, the folder of its sockets and its weights in memory are left over as such. The weights
    that a generator was fetching are kept on purpose, to go on with: those of one version.
    """
    home = Home(node.home)
    found = {Path(path) for pattern in TEMPORARY_NAMES for path in _named(pattern, node.home)}
    if len(fetched := {path for path in found if path.parent.name == "partial"}) == 1:
        found -= fetched
    found |= {path for path in _files_in(home.sockets) if _is_dead_socket(path)}
    if not node.is_running:
        found |= {folder for folder in (home.sockets, weights_in_memory(node.home)) if folder.exists()}
    leftovers = {}
    for path in found:
        with suppress(FileNotFoundError):
            leftovers[str(path), path.lstat().st_ino] = str(path)
    return leftovers


def weights_in_memory(home: Path) -> Path:
    """Where a node of this home keeps published weights, when there is room (workers/weight_store.py)."""
    digest = hashlib.sha256(str(home.absolute()).encode()).hexdigest()[:16]
    return MEMORY_DISK / f"ftis-{os.getuid()}-{digest}"


def by_role(processes: Collection[Process]) -> Mapping[str, list[Process]]:
    return {role: [p for p in processes if p.role == role] for role in sorted({p.role for p in processes})}


def role_of(process: psutil.Process, *, daemon_pid: int) -> str:
    """`daemon`, one of `ROLES`, or `other`. Raises psutil.NoSuchProcess."""
    if process.pid == daemon_pid:
        return "daemon"
    words = [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    name = Path(words[0]).name if words else process.name()
    return next((role for mark, role in ROLES.items() if mark in words or mark in name), "other")


def _process(process: psutil.Process, *, daemon_pid: int) -> Process | None:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied), process.oneshot():
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return Process(
            role_of(process, daemon_pid=daemon_pid),
            process.pid,
            _born_at(process.pid) or 0,
            rss_bytes=process.memory_info().rss,
            num_fds=0 if is_zombie else process.num_fds(),
            num_threads=process.num_threads(),
            is_zombie=is_zombie,
        )
    return None


def _lives(process: Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return _born_at(process.pid) == process.born_at and psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE
    return False


def _born_at(pid: int) -> int | None:
    """Field 22 of the kernel's line on the process; None where there is no such process. A moved clock leaves it be."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None


def _named(pattern: str, folder: Path) -> list[str]:
    """Not by pathlib's `glob`, which fails where a folder goes while it is looked through."""
    return glob.glob(str(folder / pattern), recursive=True, include_hidden=True)


def _files_in(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _is_dead_socket(path: Path) -> bool:
    with suppress(FileNotFoundError):
        return stat.S_ISSOCK(path.lstat().st_mode) and str(path) not in KERNELS_UNIX_SOCKETS.read_text()
    return False
