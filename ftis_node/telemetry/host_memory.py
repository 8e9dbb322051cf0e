"""The free memory of the host for this process, within the limits of a container or a service.

`/proc/meminfo` shows the whole host in a container, too. The limit is that of the process's control groups (cgroups).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import psutil

Group: TypeAlias = "tuple[Path, str, str]"
GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def free_host_bytes(*, groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Return the memory that this process may still use: the host's, within the limits of its control groups."""
    free = int(psutil.virtual_memory().available)
    with suppress(OSError):  # a system without control groups
        for folder, limit, used in _groups(groups, own):
            with suppress(OSError, ValueError):  # this group has no file of that name, or the limit "max"
                left = int((folder / limit).read_text()) - int((folder / used).read_text()) + _cached_bytes(folder)
                free = min(free, max(0, left))
    return free


def _groups(groups: Path, own: Path) -> Iterator[Group]:
    """Yield the folders of the process's groups and of all groups above, with the names of two files: limit and use."""
    for line in own.read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, names = groups, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):  # version 1
            top, names = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = top / path.lstrip("/")  # a container may see only `top`
        yield from ((each, *names) for each in (folder, *folder.parents) if each.is_relative_to(top))


def _cached_bytes(folder: Path) -> int:
    """Return the bytes of files that a group holds in memory, which the kernel drops when memory is needed."""
    rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return sum(int(number) for name, number in rows if name in ("active_file", "inactive_file"))
