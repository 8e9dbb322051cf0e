"""The folder for published weights between learner and generator: in memory if they fit, else in the home.

A new version is written after every step and read once. On a disk that would cost a gigabyte or more a step, although
checkpoints hold the same weights. `/dev/shm` is a file system in memory. A container often has only 64 MiB of it: then
the folder is in the home (or use `docker run --shm-size`). The next use of a home removes the files that a killed node
left in memory.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.workers.weights.store import PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftis_node.config.home import Home

log = logging.getLogger(__name__)

MEMORY_DISK = Path("/dev/shm")  # nosec B108: only a folder of mode 0700 is created in it
VERSIONS_KEPT = 2
VERSIONS_AT_ONCE = VERSIONS_KEPT + 1  # and one is being written
VERSIONS_AS_A_RESERVE = 2  # a fall-back to files keeps fewer: the oldest is overwritten
FREE_SHARE = 0.5  # at most this share of the free bytes: other programs use it, too


@contextmanager
def weights_folder(
    home: Home, *, version_bytes: int, num_versions: int = VERSIONS_AT_ONCE, memory_disk: Path = MEMORY_DISK
) -> Iterator[Path]:
    """Yield the folder for published weights of `version_bytes` each. A folder in memory is removed at the end.

    In the home the published versions are removed: a learner publishes its weights again at its start.
    """
    digest = hashlib.sha256(str(home.root.absolute()).encode()).hexdigest()[:16]
    folder = memory_disk / f"ftis-{os.getuid()}-{digest}"
    if not _claim(folder, num_bytes=num_versions * version_bytes):
        try:
            yield home.weights
        finally:
            for path in home.weights.glob(f"{PREFIX}*"):
                shutil.rmtree(path, ignore_errors=True)
        return
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def has_space(num_bytes: int, free_bytes: int) -> bool:
    """Return whether versions of `num_bytes` together fit in memory with `free_bytes` free."""
    return num_bytes <= FREE_SHARE * free_bytes


def free_in_memory(memory_disk: Path = MEMORY_DISK) -> int:
    """Return the free bytes of the file system in memory; 0 if there is none."""
    try:
        return shutil.disk_usage(memory_disk).free
    except OSError:
        return 0


def _claim(folder: Path, *, num_bytes: int) -> bool:
    """Create an empty `folder`, readable by this user only. Returns False without shared memory or enough space."""
    try:
        if os.path.lexists(folder) and folder.lstat().st_uid == os.getuid():
            shutil.rmtree(folder)  # left by a node that was killed: this process holds the home's lock
        free_bytes = shutil.disk_usage(folder.parent).free
        if not has_space(num_bytes, free_bytes):
            log.debug("weights go through the home: %s has %d bytes free, %d are needed", folder, free_bytes, num_bytes)
            return False
        folder.mkdir(mode=0o700)  # raises if another user has created anything at this path
    except OSError as error:
        log.debug("weights go through the home: %s", error)
        return False
    return True
