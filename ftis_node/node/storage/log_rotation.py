"""Rotation by size of log files that other processes write.

A worker writes to a file that it inherited, and cannot open another one. So rotation copies the content to
`generation.log.1` and truncates the file. The worker appends, so it continues at the start of the file. A line that
the worker writes between copy and truncation is lost. A pipe instead would let a full pipe block the worker.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from ftis_node.config.disk_room import is_disk_full

if TYPE_CHECKING:
    from pathlib import Path


def rotate_log(path: Path, *, max_bytes: int) -> bool:
    """Move the content of `path` to `<name>.1`, replacing that file, if it has `max_bytes` or more.

    Return whether the file was rotated. On a full disk the content is lost instead. Raise OSError.
    """
    if not path.is_file() or path.stat().st_size < max_bytes:
        return False
    older = path.with_name(f"{path.name}.1")
    older.unlink(missing_ok=True)  # before the copy, so that there are never three files
    try:
        shutil.copyfile(path, older)
    except OSError as error:
        older.unlink(missing_ok=True)
        if not is_disk_full(error, path.parent):
            raise
    os.truncate(path, 0)
    return True
