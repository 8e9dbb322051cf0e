"""Rotation by size of log files that other processes write.

A worker's output is a file that it inherited, and it cannot be made to open another. So the content is copied to
`generation.log.1` and the file is emptied. The worker appends, so it continues at the start of the file. A line that
is written between the two is lost, and no process waits for another to take its output.
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

    Return whether it was moved. On a full disk the content is lost instead. Raise OSError.
    """
    if not path.is_file() or path.stat().st_size < max_bytes:
        return False
    older = path.with_name(f"{path.name}.1")
    older.unlink(missing_ok=True)  # before the copy is made: never three of them
    try:
        shutil.copyfile(path, older)
    except OSError as error:
        older.unlink(missing_ok=True)
        if not is_disk_full(error, path.parent):
            raise
    os.truncate(path, 0)
    return True
