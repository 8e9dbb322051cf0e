"""Temporary folder for the homes of an experiment's nodes, in memory if possible.

A node writes its replay buffer and its weights with every step synced to disk. The homes of an experiment are
temporary, and waiting for the disk would take most of the time. A killed process cannot clean up, so the next
experiment removes folders of processes that no longer exist.
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
    """Create a folder for this process and remove it at the end."""
    root = parent or (MEMORY_DISK if os.access(MEMORY_DISK, os.W_OK) else Path(tempfile.gettempdir()))
    for folder in root.glob(f"{PREFIX}*"):
        if not _is_alive(folder.name.removeprefix(PREFIX)):
            shutil.rmtree(folder, ignore_errors=True)  # cannot remove folders of other users
    own = root / f"{PREFIX}{os.getpid()}"
    shutil.rmtree(own, ignore_errors=True)  # left by an earlier process with the same pid
    own.mkdir(mode=0o700)  # raises if another user created something at this path
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
