"""The processes of a node, its orphaned processes, and the files that it left behind.

The processes of a node are its daemon and all descendants. An orphan is a former descendant, or a process with the
node's home or sockets in its command line, that is no descendant now.
"""

import glob
import hashlib
import os
import re
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import psutil

from ftis_node.config.home import Home
from ftis_node.workers.weight_store import MEMORY_DISK
from tests.chaos.swarm import SwarmNode, role_of

TEMPORARY_NAMES = ("**/.*.incomplete-*", "**/*.tmp", "**/*.new", "**/*.part", "**/*-journal")
KERNEL_UNIX_SOCKETS = Path("/proc/net/unix")

Identity: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Process:
    """One process. `born_at` is its start time in kernel ticks since boot. A zombie has ended without a `wait`."""

    role: str
    pid: int
    born_at: int
    rss_bytes: int = 0
    num_fds: int = 0
    num_threads: int = 0
    is_zombie: bool = False

    @property
    def identity(self) -> Identity:
        """A unique key: process ids are reused, but not with the same start time."""
        return self.pid, self.born_at


def family_of(node: SwarmNode) -> tuple[Process, ...]:
    if not node.is_running:
        return ()
    with suppress(psutil.NoSuchProcess):
        daemon = psutil.Process(node.pid)
        members = [daemon, *daemon.children(recursive=True)]
        return tuple(found for member in members if (found := _process(member, daemon_pid=node.pid)) is not None)
    return ()


def orphans_of(node: SwarmNode, former: Collection[Process], family: Collection[Process]) -> dict[Identity, str]:
    """Return a description of each orphan by identity, with the role if it is known."""
    present = {process.identity for process in family}
    orphans = {process.identity: f"{process.role} (pid {process.pid})" for process in former if _is_running(process)}
    marks = "|".join(re.escape(str(folder)) for folder in (node.home, Home(node.home).sockets))
    names_node = re.compile(f"({marks})(/|$)")
    for process in psutil.process_iter(["pid", "cmdline"]):
        words, pid = process.info["cmdline"] or [], process.info["pid"]
        if any(names_node.search(word) for word in words) and (born_at := _born_at(pid)) is not None:
            orphans.setdefault((pid, born_at), " ".join(words)[:120])
    return {identity: text for identity, text in orphans.items() if identity not in present}


def leftovers_of(node: SwarmNode) -> dict[tuple[str, int], str]:
    """Return the leftover files by path and inode: temporary files, and sockets without a listener.

    If the node does not run, the folder of its sockets and its weights in memory are leftovers too. Partially fetched
    weights of one version are no leftover, because the generator resumes the fetch.
    """
    home = Home(node.home)
    # the module `glob`, because `Path.glob` fails if a folder disappears during the search
    named = (glob.glob(str(node.home / each), recursive=True, include_hidden=True) for each in TEMPORARY_NAMES)
    found = {Path(path) for paths in named for path in paths}
    if len(fetched := {path for path in found if path.parent.name == "partial"}) == 1:
        found -= fetched
    found |= {path for path in home.sockets.glob("*") if _is_dead_socket(path)}
    if not node.is_running:
        found |= {folder for folder in (home.sockets, weights_in_memory(node.home)) if folder.exists()}
    leftovers = {}
    for path in found:
        with suppress(FileNotFoundError):
            leftovers[str(path), path.lstat().st_ino] = str(path)
    return leftovers


def weights_in_memory(home: Path) -> Path:
    """Return the folder in memory for the published weights of this home, see ftis_node/workers/weight_store.py."""
    digest = hashlib.sha256(str(home.absolute()).encode()).hexdigest()[:16]
    return MEMORY_DISK / f"ftis-{os.getuid()}-{digest}"


def by_role(processes: Collection[Process]) -> Mapping[str, list[Process]]:
    return {role: [p for p in processes if p.role == role] for role in sorted({p.role for p in processes})}


def _process(process: psutil.Process, *, daemon_pid: int) -> Process | None:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied), process.oneshot():
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return Process(
            role_of(process, daemon_pid=daemon_pid), process.pid, _born_at(process.pid) or 0,
            rss_bytes=process.memory_info().rss, num_fds=0 if is_zombie else process.num_fds(),
            num_threads=process.num_threads(), is_zombie=is_zombie,
        )  # fmt: skip
    return None


def _is_running(process: Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return _born_at(process.pid) == process.born_at and psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE
    return False


def _born_at(pid: int) -> int | None:
    """Return field 22 of /proc/PID/stat, or None. It does not depend on the wall clock."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None


def _is_dead_socket(path: Path) -> bool:
    with suppress(FileNotFoundError):
        return stat.S_ISSOCK(path.lstat().st_mode) and str(path) not in KERNEL_UNIX_SOCKETS.read_text()
    return False
