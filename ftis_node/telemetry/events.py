"""The event trail: one JSON line for each thing that happened, in `events.jsonl`.

Every stage of a rollout writes one line with the group's id, so a text search follows one group from prompt to
gradient. The file is turned over at a size, so a node that runs for months does not fill the disk with it.
"""

from __future__ import annotations

import json
import logging
import time
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_MAX_BYTES = 64 << 20
DEFAULT_KEPT_FILES = 3
JsonValue = str | int | float | bool | None


class EventTrail:
    """Appends events to a file. Cheap enough to be called for every group."""

    def __init__(self, path: Path, *, max_bytes: int = DEFAULT_MAX_BYTES, kept_files: int = DEFAULT_KEPT_FILES) -> None:
        self._handler = RotatingFileHandler(path, maxBytes=max_bytes, backupCount=kept_files, encoding="utf-8")
        self._handler.setFormatter(logging.Formatter("%(message)s"))

    def write(self, event: str, **fields: JsonValue | bytes | list[Any] | dict[str, Any]) -> None:
        """One line `{"time": ..., "event": ..., ...}`. Bytes (ids) are written as hex."""
        readable = {key: value.hex() if isinstance(value, bytes) else value for key, value in fields.items()}
        line = json.dumps({"time": round(time.time(), 3), "event": event, **readable}, separators=(",", ":"))
        self._handler.emit(logging.LogRecord("events", logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        """Closes the file."""
        self._handler.close()


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
