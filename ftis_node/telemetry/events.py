"""The event log: one JSON line for each event, in `events.jsonl`.

Every stage of a rollout writes one line with the group's id, so a text search follows one group from prompt to
gradient. The file is rotated by size, so it does not fill the disk.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from ftis_node.files import NO_ROOM, check_regular, open_to_write
from ftis_node.telemetry.log import RateLimitedLog, is_out_of_files
from ftis_node.telemetry.secrets import redacted

EVENT_SCHEMA = 1  # in each `start` event
log = logging.getLogger(__name__)

EVENT_FILE_BYTES = 64 << 20  # at this size the file is rotated
KEPT_EVENT_FILES = 3  # rotated files; the current one comes on top
LONGEST_LINE = 1 << 20
MAX_WAITING_BYTES = 8 << 20
LAST_BYTES = 2 << 20
MAX_ROTATED_FILES = 99
JsonValue = str | int | float | bool | None


class EventLog:
    """Append-only writer of events, usable from any thread and cheap enough for a call for every group.

    Lines that a full disk refuses wait in memory, up to `MAX_WAITING_BYTES`, and are written before the next one.
    Raises OSError for any other error, FileError if the path is a link or a folder.
    """

    def __init__(self, path: Path, *, max_bytes: int = EVENT_FILE_BYTES, kept_files: int = KEPT_EVENT_FILES) -> None:
        _drop_half_line(path)
        self._path, self._max_bytes, self._kept_files = path, max_bytes, kept_files
        self._lock = threading.Lock()
        self._shortage = RateLimitedLog()
        self._waiting = bytearray()  # not written yet
        self._is_in_line = False  # whether `_waiting` begins with the rest of a line
        self.num_dropped = 0  # lines that found no place in memory
        self._file: int | None = _opened(path)

    def write(self, event: str, **fields: JsonValue | bytes | list[Any] | dict[str, Any]) -> None:
        """Write one line `{"time": ..., "event": ..., ...}`. Bytes (ids) are written as hex."""
        readable = {key: value.hex() if isinstance(value, bytes) else value for key, value in fields.items()}
        line = json.dumps({"time": round(time.time(), 3), "event": event, **readable}, separators=(",", ":"))
        data = (redacted(line) + "\n").encode()
        with self._lock:
            is_late = self._file is None  # after `close`: the file is open for this event alone
            try:
                if len(self._waiting) + len(data) <= MAX_WAITING_BYTES:
                    self._waiting += data
                else:
                    self.num_dropped += 1
                self._write_waiting()
            finally:
                if is_late:
                    self._close()

    def _write_waiting(self) -> None:
        """Write the waiting lines, as many as the disk has space for."""
        try:
            file = self._file = _opened(self._path) if self._file is None else self._file
            written = 0 if self._is_in_line else os.fstat(file).st_size
            if 0 < written and written + len(self._waiting) > self._max_bytes:
                file = self._file = self._next_file(file)
            while self._waiting:
                num_bytes = os.write(file, self._waiting)
                self._is_in_line = not self._waiting.endswith(b"\n", 0, num_bytes)
                del self._waiting[:num_bytes]
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if self._shortage.is_due():
                log.warning("events wait in memory until the disk has space: %s", error)

    def _next_file(self, file: int) -> int:
        """Open the next file before closing the full one; keep the full one if no file can be opened."""
        full, new = self._path, self._path.with_name(f"{self._path.name}.new")
        try:
            opened = _opened(new)
        except OSError as error:
            if not is_out_of_files(error):
                raise
            if self._shortage.is_due():
                log.warning("%s is full and no other file can be opened (%s): it continues to grow", full, error)
            return file
        for number in range(self._kept_files - 1, 0, -1):
            older = full.with_name(f"{full.name}.{number}")
            if older.exists():
                older.replace(full.with_name(f"{full.name}.{number + 1}"))
        full.replace(full.with_name(f"{full.name}.1"))
        new.replace(full)
        os.close(file)
        return opened

    def close(self) -> None:
        with self._lock:
            self._close()
            if num_lost := self.num_dropped + self._waiting.count(b"\n"):
                log.warning("the disk was full: the last %d events are not in %s", num_lost, self._path)

    def _close(self) -> None:
        if self._waiting:
            self._write_waiting()
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def _opened(path: Path) -> int:
    """Open a file. A symbolic link is refused, because it may lead out of the home."""
    return open_to_write(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def event_log_files(path: Path) -> list[Path]:
    """Return the log's existing files: rotated ones first, the current one last."""
    numbered = [file for file in path.parent.glob(f"{path.name}.*") if file.suffix[1:].isdecimal()]
    older = sorted(numbered, key=lambda file: int(file.suffix[1:]), reverse=True)
    return [file for file in (*older, path) if file.exists()]


def last_lines(path: Path, *, num_bytes: int = LAST_BYTES) -> list[bytes]:
    """Return the last complete lines of the log, of `num_bytes` bytes of each of its last two files at most."""
    lines: list[bytes] = []
    for name in event_log_files(path)[-2:]:
        check_regular(name)
        with name.open("rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - num_bytes)
            file.seek(begin)
            found = file.read(num_bytes).splitlines(keepends=True)
        lines += found[1:] if begin else found
    return [line for line in lines if line.endswith(b"\n")]


def _drop_half_line(path: Path) -> None:
    """Remove a half-written last line (full disk, power loss), so that the next event starts a new line."""
    check_regular(path, follow_links=False)
    if not path.exists():
        return
    with path.open("rb+") as file:
        length = file.seek(0, os.SEEK_END)
        position = max(0, length - LONGEST_LINE)
        file.seek(position)
        tail = file.read()
        file.truncate(position + tail.rfind(b"\n") + 1)


class EventReader:
    """Follower of an event log: yields each complete line once, oldest first, across rotated files.

    Its position is (inode, offset), because a rotated file changes its name and keeps its inode. The newest file is
    opened first: a file that rotates between two openings is opened twice, which its inode shows, and never missed.
    Lines are bytes with their line break. A half-written line is left for the next call.
    """

    def __init__(self, path: Path) -> None:
        """Begin at the oldest line. The file need not exist yet."""
        self._path = path
        self._inode: int | None = None
        self._offset = 0

    def read_new(self) -> Iterator[bytes]:
        """Yield the lines appended since the last call; the first call yields all lines.

        The end of a rotated file is yielded even without a line break, because no process writes to it any more.
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
        """Open the files from the current one to the newest, or all of them, oldest first."""
        files: dict[int, BinaryIO] = {}
        rotated = (self._path.with_name(f"{self._path.name}.{number}") for number in range(1, MAX_ROTATED_FILES + 1))
        for path in (self._path, *rotated):
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


def read_events(path: Path, *, name: str | None = None) -> list[dict[str, Any]]:
    """Return the events of a log, oldest first, with those of its rotated files; only those called `name` if given."""
    lines = (line for line in EventReader(path).read_new() if line.endswith(b"\n"))  # a loss of power may cut the last
    events = map(json.loads, lines)
    return [event for event in events if name is None or event["event"] == name]
