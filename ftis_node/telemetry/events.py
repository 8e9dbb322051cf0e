"""The event trail: one JSON line for each thing that happened, in `events.jsonl`.

Every stage of a rollout writes one line with the group's id, so a text search follows one group from prompt to
gradient. The file is turned over at a size, so a node that runs for months does not fill the disk with it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftis_node.files import check_regular, open_to_write
from ftis_node.telemetry.secrets import redacted
from ftis_node.telemetry.seldom import Seldom, is_out_of_files

if TYPE_CHECKING:
    from io import TextIOWrapper

log = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 64 << 20
DEFAULT_KEPT_FILES = 3
LONGEST_LINE = 1 << 20
JsonValue = str | int | float | bool | None


class TurningFile(RotatingFileHandler):
    """Looks at its own count, not at the file system, to see whether the file is full: there is a line a group."""

    _shortage = Seldom()

    def _open(self) -> TextIOWrapper:
        """Never through a link, which may lead out of the home."""
        return self._opened(Path(self.baseFilename))

    def doRollover(self) -> None:
        """Opens the next file before it closes the full one, which goes on where no further one can be opened."""
        full = Path(self.baseFilename)
        new = full.with_name(f"{full.name}.new")
        try:
            stream = self._opened(new)
        except OSError as error:
            if not is_out_of_files(error):
                raise
            if self._shortage.is_due():
                log.warning("%s is full and no other file can be opened (%s): it grows on", full, error)
            return
        for number in range(self.backupCount - 1, 0, -1):
            older = full.with_name(f"{full.name}.{number}")
            if older.exists():
                older.replace(full.with_name(f"{full.name}.{number + 1}"))
        full.replace(full.with_name(f"{full.name}.1"))
        new.replace(full)
        if self.stream is not None:
            self.stream.close()
        self.stream = stream

    def _opened(self, path: Path) -> TextIOWrapper:
        return os.fdopen(open_to_write(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", encoding=self.encoding)

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        """Whether this line would be too much."""
        written = self.stream.tell() if self.stream is not None else 0
        return written > 0 and written + len(record.getMessage()) >= self.maxBytes

    def handleError(self, record: logging.LogRecord) -> None:
        """A line that cannot be written is an error of the caller's, not a traceback between log lines."""
        raise


class EventTrail:
    """Appends events to a file, from any thread. Cheap enough to be called for every group.

    Raises OSError where the disk is full, FileError where a link or folder is in the file's place.
    """

    def __init__(self, path: Path, *, max_bytes: int = DEFAULT_MAX_BYTES, kept_files: int = DEFAULT_KEPT_FILES) -> None:
        _drop_half_line(path)
        self._handler = TurningFile(path, maxBytes=max_bytes, backupCount=kept_files, encoding="utf-8")
        self._handler.setFormatter(logging.Formatter("%(message)s"))

    def write(self, event: str, **fields: JsonValue | bytes | list[Any] | dict[str, Any]) -> None:
        """One line `{"time": ..., "event": ..., ...}`. Bytes (ids) are written as hex."""
        readable = {key: value.hex() if isinstance(value, bytes) else value for key, value in fields.items()}
        line = json.dumps({"time": round(time.time(), 3), "event": event, **readable}, separators=(",", ":"))
        self._handler.handle(logging.LogRecord("events", logging.INFO, "", 0, redacted(line), None, None))

    def close(self) -> None:
        """Closes the file."""
        self._handler.close()


def trail_files(path: Path) -> list[Path]:
    """The trail's files, those that were turned over first, the present one last; only those that exist."""
    numbered = [file for file in path.parent.glob(f"{path.name}.*") if file.suffix[1:].isdecimal()]
    older = sorted(numbered, key=lambda file: int(file.suffix[1:]), reverse=True)
    return [file for file in (*older, path) if file.exists()]


def _drop_half_line(path: Path) -> None:
    """Cuts off what a full disk or a power cut left of a last line, so that the next begins a line of its own."""
    check_regular(path, follow_links=False)
    if not path.exists():
        return
    with path.open("rb+") as file:
        length = file.seek(0, os.SEEK_END)
        position = max(0, length - LONGEST_LINE)
        file.seek(position)
        tail = file.read()
        file.truncate(position + tail.rfind(b"\n") + 1)


def read_events(path: Path, *, name: str | None = None) -> list[dict[str, Any]]:
    """The events in one file, oldest first; those called `name` where given. A half-written last line is left out."""
    if not path.exists():
        return []
    events = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            event = json.loads(line)
            if name is None or event["event"] == name:
                events.append(event)
    return events
