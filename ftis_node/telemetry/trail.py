"""The event trail read line by line, over all its turned-over files, by someone who does not write it.

A reader keeps its place as (file, offset), the file known by its inode: a file that was turned over has another name
and the same inode. So a follower reads each line once, whatever the writer does meanwhile. Files are opened the newest
first: one that is turned over between two openings is met twice, which shows, and never missed.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, BinaryIO

from ftis_node.files import check_regular

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_TURNED_OVER = 99


class TrailReader:
    """Complete lines, each once, the oldest first. A line is bytes with its end of line; a half-written one waits."""

    def __init__(self, path: Path) -> None:
        """Nothing is opened, and nothing needs to be there, before `read_new`."""
        self._path = path
        self._inode: int | None = None
        self._offset = 0

    def read_new(self) -> Iterator[bytes]:
        """The lines that were appended since the last call; at the first one all that there are.

        What an older file ends with is given as it is: nobody writes there any more.
        """
        with ExitStack() as opened:
            files = self._files_to_read(opened)
            for position, file in enumerate(files):
                if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                is_newest = position == len(files) - 1
                for line in file:
                    if is_newest and not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    yield line

    def _files_to_read(self, opened: ExitStack) -> list[BinaryIO]:
        """From the file where this reader stands to the newest; all of them where it stands in none, oldest first."""
        files: dict[int, BinaryIO] = {}
        for path in self._names():
            check_regular(path)
            try:
                file = opened.enter_context(path.open("rb"))
            except FileNotFoundError:
                break
            inode = os.fstat(file.fileno()).st_ino
            files.setdefault(inode, file)
            if inode == self._inode:
                break
        return list(files.values())[::-1]

    def _names(self) -> Iterator[Path]:
        """The newest first: `events.jsonl`, then `events.jsonl.1`, and so on."""
        yield self._path
        for number in range(1, MAX_TURNED_OVER + 1):
            yield self._path.with_name(f"{self._path.name}.{number}")
