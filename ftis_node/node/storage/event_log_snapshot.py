"""A snapshot of the event log's summary, so that a start reads only the lines that follow it.

The snapshot is a file in the home: a checksum, then msgpack. It has the summary of the lines up to a position in the
log. The node writes it at its stop, and whenever the log has grown by `RENEW_BYTES`. So a start reads a bounded number
of bytes, however long the log is.

The log itself counts. A snapshot is used only if its file of the log still has the same bytes before the position. The
comparison covers the last `COMPARED_BYTES`. Without a valid snapshot the whole log is read.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from ftis_node.errors import FileError
from ftis_node.files import read_file, replace_file
from ftis_node.telemetry.event_log_summary import EventLogSummary
from ftis_node.telemetry.events import EventReader, event_log_files

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.config.home import Home

log = logging.getLogger(__name__)

SNAPSHOT_VERSION = 1
RENEW_BYTES = 4 << 20
COMPARED_BYTES = 1 << 20
MAX_SNAPSHOT_BYTES = 64 << 20
CHECKSUM_BYTES = hashlib.sha256().digest_size


class _Snapshot(msgspec.Struct):
    """The content of the file. The position is a file of the log, by its inode, and the number of its bytes read."""

    version: int
    inode: int
    offset: int
    last_bytes: bytes  # SHA-256 of the last bytes before the position
    summary: EventLogSummary


_DECODER = msgspec.msgpack.Decoder(_Snapshot)


class EventLogSnapshot:
    """Reader and writer of a home's snapshot. Calls must not run at the same time."""

    def __init__(self, home: Home) -> None:
        self._log = home.events
        self._path = home.event_log_snapshot
        self._inode = -1
        self._offset = 0

    def read(self) -> EventLogSummary:
        """Return the summary of the whole log, from the snapshot and the lines after it. Raise OSError.

        Write a snapshot if there was none, or if it was old. `num_damaged` counts the lines after the snapshot.
        """
        summary, reader, num_bytes = self._read()
        if num_bytes >= RENEW_BYTES // 4 or self._inode == -1:
            self._write(summary, reader)
        return summary

    def renew(self) -> None:
        """Write a snapshot of the log as it is now. Raise OSError if the log cannot be read."""
        summary, reader, _ = self._read()
        self._write(summary, reader)

    def renew_if_due(self) -> None:
        """Write a snapshot if the log has grown by `RENEW_BYTES` since the last one, or has rotated. Raise OSError."""
        try:
            now = self._log.stat()
        except FileNotFoundError:
            return
        if now.st_ino != self._inode or now.st_size - self._offset >= RENEW_BYTES:
            self.renew()

    def _read(self) -> tuple[EventLogSummary, EventReader, int]:
        """Return the summary, the reader at its end, and the number of bytes of the log that were read."""
        snapshot, num_bytes = self._valid_snapshot(), 0
        if snapshot is None:
            summary, reader = EventLogSummary(), EventReader(self._log)
        else:
            summary, reader = snapshot.summary, EventReader(self._log, position=(snapshot.inode, snapshot.offset))
            self._inode, self._offset = snapshot.inode, snapshot.offset
        for line in reader.read_new():
            summary.add(line)
            num_bytes += len(line)
        return summary, reader, num_bytes

    def _write(self, summary: EventLogSummary, reader: EventReader) -> None:
        if reader.position is None:  # there is no log yet
            return
        self._inode, self._offset = inode, offset = reader.position
        file = _file_with(self._log, inode)
        if file is None:  # removed meanwhile
            return
        known = replace(summary, num_damaged=0)
        snapshot = _Snapshot(SNAPSHOT_VERSION, inode, offset, _digest_before(file, offset), known)
        content = msgspec.msgpack.encode(snapshot)
        try:
            replace_file(self._path, hashlib.sha256(content).digest() + content)
        except OSError as error:  # a full disk: the next start reads more lines
            log.debug("snapshot of the event log not written: %s", error)

    def _valid_snapshot(self) -> _Snapshot | None:
        """Return the snapshot; None if it is missing, damaged, of another version, or not of this log."""
        try:
            data = read_file(self._path, max_bytes=MAX_SNAPSHOT_BYTES)
            content = data[CHECKSUM_BYTES:]
            if hashlib.sha256(content).digest() != data[:CHECKSUM_BYTES]:
                raise ValueError("its checksum is wrong")
            snapshot = _DECODER.decode(content)
        except FileNotFoundError:
            return None
        except (OSError, FileError, ValueError) as error:  # msgspec's errors are ValueErrors
            log.debug("snapshot of the event log unusable: %s; the whole log is read", error)
            return None
        file = _file_with(self._log, snapshot.inode)
        if snapshot.version != SNAPSHOT_VERSION or file is None:
            return None
        return snapshot if _digest_before(file, snapshot.offset) == snapshot.last_bytes else None


def _file_with(path: Path, inode: int) -> Path | None:
    """Return the log's file with this inode; a rotated file keeps it."""
    return next((file for file in event_log_files(path) if file.stat().st_ino == inode), None)


def _digest_before(file: Path, offset: int) -> bytes:
    """Return the SHA-256 of the last bytes before `offset`, together with their number; a shorter file has fewer."""
    with file.open("rb") as lines:
        start = max(0, offset - COMPARED_BYTES)
        lines.seek(start, os.SEEK_SET)
        content = lines.read(offset - start)
    return hashlib.sha256(len(content).to_bytes(8, "little") + content).digest()
