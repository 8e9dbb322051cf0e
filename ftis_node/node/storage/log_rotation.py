"""Log files that other processes write, turned over by size under their writers' hands.

A worker's output is a file that it inherited: nobody can tell it to open another. So what is in the file is copied to
`generation.log.1` and the file is emptied; the worker, which appends, goes on at its start. A line that is written
between the two is lost, and no process ever waits for another to take its output.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from ftis_node.config.disk_room import is_disk_full

if TYPE_CHECKING:
    from pathlib import Path


def rotate_log(path: Path, *, max_bytes: int) -> bool:
    """Moves what is in `path` to `<name>.1`, in the place of what was there, where it is `max_bytes` or more.

    Whether it was. On a full disk what was in it is lost instead. Raises OSError.
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
