"""Free disk space, and errors of a full disk as one MachineError."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ftis_node.errors import DiskFullError, MachineError
from ftis_node.files import NO_ROOM

LITTLE_BYTES = 1 << 20  # for some writes to a full disk SQLite reports only an I/O error


def is_disk_full(error: BaseException, root: Path) -> bool:
    """Return whether the disk is full: by the error's code, or for SQLite's I/O errors by the free space at `root`."""
    if isinstance(error, DiskFullError):
        return True
    if isinstance(error, OSError):
        return error.errno in NO_ROOM
    import sqlite3  # every command reads this file, and most touch no database

    if not isinstance(error, sqlite3.OperationalError):
        return False
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and free_bytes(root) < LITTLE_BYTES)


def disk_full(root: Path) -> DiskFullError:
    return DiskFullError(
        f"the disk is full: {free_bytes(root) / 1e6:.1f} MB are free at {root}; free disk space and start "
        "again; the node resumes"
    )


def write_error(message: str, error: OSError) -> MachineError:
    """Return the error of a disk that refuses a write, with its own class if the disk is full."""
    return (DiskFullError if error.errno in NO_ROOM else MachineError)(message)


@contextmanager
def reporting_full_disk(root: Path) -> Iterator[None]:
    """Turn an error of a full disk into a MachineError of one line."""
    try:
        yield
    except Exception as error:
        if is_disk_full(error, root) and not isinstance(error, DiskFullError):
            raise disk_full(root) from error
        raise


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that holds `path`, or will hold it."""
    folder = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(folder).free
