"""The folder of p2pd's unix sockets: private, with a short path, emptied at each start."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from ftis_node.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

MAX_SOCKET_PATH_BYTES = 107  # the kernel's limit on the path of a unix socket
CONTROL_NAME = "p2pd.sock"
STREAMS_NAME = "streams.sock"
PROBE_NAME = "probe.sock"
KEY_NAME = "p2pd.key"
_NAMES = (CONTROL_NAME, STREAMS_NAME, PROBE_NAME, KEY_NAME, KEY_NAME + ".new")


def prepare(folder: Path) -> None:
    """Create the folder, readable by its owner only, and remove files that a killed process left.

    Raises UsageError if its path is too long, it cannot be created, or it belongs to another user.
    """
    longest = max(len(os.fsencode(folder.absolute() / name)) for name in _NAMES[:2])
    if longest > MAX_SOCKET_PATH_BYTES:
        raise UsageError(
            f"the path {folder} is too long for a unix socket ({longest} bytes, {MAX_SOCKET_PATH_BYTES} allowed): "
            "choose a shorter one"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise UsageError(f"{folder} must be a folder of this user's: remove it, or choose another")
        folder.chmod(0o700)
        clear(folder)
    except OSError as error:
        raise UsageError(f"cannot use {folder} for sockets: {error.strerror}") from None


def clear(folder: Path) -> None:
    """Remove our files and keep others."""
    for name in _NAMES:
        (folder / name).unlink(missing_ok=True)


def remove(folder: Path, name: str) -> None:
    """Remove one of our files, so that the next start does not find it."""
    (folder / name).unlink(missing_ok=True)
