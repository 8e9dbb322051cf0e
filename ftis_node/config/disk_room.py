"""Writes that survive a full disk and a power cut.

A file is replaced whole or not at all: opening it for writing would empty it. `reporting_full_disk` turns any error of
a full disk into one MachineError.

A function here returns when its change is on the disk. It syncs a file's content and the folder of its name. For a new
folder it syncs the one above.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ftis_node.errors import MachineError
from ftis_node.files import check_no_folder, open_to_write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
LITTLE_BYTES = 1 << 20  # for some writes to a full disk SQLite reports only an I/O error


def is_disk_full(error: BaseException, root: Path) -> bool:
    """Return whether the disk is full: by the error's code, or for SQLite's I/O errors by the free space at `root`."""
    if isinstance(error, OSError):
        return error.errno in NO_ROOM
    import sqlite3  # every command reads this file, and most touch no database

    if not isinstance(error, sqlite3.OperationalError):
        return False
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and free_bytes(root) < LITTLE_BYTES)


def disk_full(root: Path) -> MachineError:
    return MachineError(
        f"the disk is full: {free_bytes(root) / 1e6:.1f} MB are free at {root}; free disk space and start "
        "again; the node resumes"
    )


@contextmanager
def reporting_full_disk(root: Path) -> Iterator[None]:
    """Turn an error of a full disk into a MachineError of one line."""
    try:
        yield
    except Exception as error:
        if is_disk_full(error, root):
            raise disk_full(root) from error
        raise


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that holds `path`, or will hold it."""
    folder = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(folder).free


def sync_to_disk(path: Path) -> None:
    """Write a file's content, or a folder's names, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and the missing ones above it. Raises OSError."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(made):
        sync_to_disk(folder.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` to `path`, which keeps its content if that fails.

    Raises OSError. Raises FileError if `path` is a folder, or if the temporary file's name is a link.
    """
    check_no_folder(path)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with os.fdopen(open_to_write(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_to_disk(path.parent)
