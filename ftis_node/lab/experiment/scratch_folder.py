"""A folder for the homes of an experiment's nodes, in memory where the system offers that.

A node writes its replay buffer and its weights with every step synchronised to the disk. In an experiment the homes are
thrown away, and waiting for a disk would be most of the time. Who is killed cannot tidy up, so folders of processes
that are gone are removed by whoever comes next.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY_DISK = Path("/dev/shm")  # nosec B108: only a folder of 0700 is made in it
PREFIX = "ftis-compare-"


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """A folder of this process's own, removed at the end."""
    root = parent or (MEMORY_DISK if os.access(MEMORY_DISK, os.W_OK) else Path(tempfile.gettempdir()))
    for folder in root.glob(f"{PREFIX}*"):
        if not _is_alive(folder.name.removeprefix(PREFIX)):
            shutil.rmtree(folder, ignore_errors=True)  # another user's stays
    own = root / f"{PREFIX}{os.getpid()}"
    shutil.rmtree(own, ignore_errors=True)  # of a process that had our number
    own.mkdir(mode=0o700)  # raises where someone else has put anything in this place
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True
