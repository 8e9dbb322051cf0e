"""A full disk and a power cut, which may come at any moment: nothing that was there before is lost.

Files are replaced whole or not at all, for a file that is opened for writing is empty from then on. Whatever was being
written when the room ran out fails as it may; `reporting_full_disk` stands around all of it and says what is the matter.

What a function here has returned from outlives a power cut: a file by the sync of its content and of the folder that
has its name, a folder by that of the one above it.
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
LITTLE_BYTES = 1 << 20  # SQLite calls some writes that find no room a plain I/O error


def is_disk_full(error: BaseException, root: Path) -> bool:
    """Whether `error` says that there is no room, by its own code or, for SQLite's I/O errors, by a look at `root`."""
    if isinstance(error, OSError):
        return error.errno in NO_ROOM
    import sqlite3  # every command reads this file, and most touch no database

    if not isinstance(error, sqlite3.OperationalError):
        return False
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and free_bytes(root) < LITTLE_BYTES)


def disk_full(root: Path) -> MachineError:
    """What is told of it."""
    return MachineError(
        f"the disk is full: {free_bytes(root) / 1e6:.1f} MB are free at {root}; make room and start again: it goes on "
        "where it was"
    )


@contextmanager
def reporting_full_disk(root: Path) -> Iterator[None]:
    """Inside, an error that comes of a full disk becomes a MachineError with one line."""
    try:
        yield
    except Exception as error:
        if is_disk_full(error, root):
            raise disk_full(root) from error
        raise


def free_bytes(path: Path) -> int:
    """What is free where `path` is, or will be."""
    folder = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(folder).free


def sync_to_disk(path: Path) -> None:
    """A file's content, or the names in a folder, outlive a power cut from here on. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Makes a folder and those above it, where they are missing. Raises OSError."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(made):
        sync_to_disk(folder.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Puts `data` into `path`, which is as it was where that fails.

    Raises OSError, FileError where a folder is there, or a link in place of the file that is written first.
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
