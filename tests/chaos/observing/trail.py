"""A node's event trail as a watcher remembers it: every line once, also where the file is cut or changed afterwards.

The watcher reads all files each time and knows a line by its content. A line that is new but stands before known ones
was changed by somebody else than the node; such lines are counted and not believed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ftis_node.telemetry.events import event_log_files, present_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FIELDS = {
    "start": ("peer",),
    "admitted": ("group", "own", "sender", "number", "policy_version"),
    "taken": ("group", "step"),
    "released": ("group",),
    "step": ("step", "policy_version"),
    "served": ("version",),
    "recovered": ("file",),
}  # of each event, what an invariant looks at: a line without it is damaged


@dataclass(frozen=True, slots=True)
class Event:
    """One line; of its fields those that an invariant looks at."""

    name: str
    time: float = 0.0
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]


def parse(line: bytes) -> Event | None:
    try:
        found = json.loads(line)
        name = present_name(str(found["event"]))
        fields = {key: found[key] for key in FIELDS.get(name, ())}
        return Event(name, float(found["time"]), fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


@dataclass
class EventLogMemory:
    """All events that were ever seen in the trail at `path`, in their order."""

    path: Path
    events: list[Event] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)  # lines with an end that are no events
    num_changed: int = 0  # lines that are not what they were
    is_torn: bool = False  # the newest file does not end with the end of a line
    _seen: set[int] = field(default_factory=set)

    def look(self) -> None:
        """Reads the trail."""
        lines = [line for file in event_log_files(self.path) for line in _lines(file)]
        self.is_torn = bool(lines) and not lines[-1].endswith(b"\n")
        whole = lines[:-1] if self.is_torn else lines
        known = [hash(line) in self._seen for line in whole]
        first_new = len(known) - known[::-1].index(True) if True in known else 0
        self.num_changed = known[:first_new].count(False)
        for line in whole[first_new:]:
            self._take(line)

    def _take(self, line: bytes) -> None:
        self._seen.add(hash(line))
        if (event := parse(line)) is None:
            self.damaged.append(line[:120].decode(errors="replace").rstrip())
        else:
            self.events.append(event)


def _lines(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:  # turned over a moment ago
        return []
