"""A node's event trail as a watcher remembers it: every line once, also where the file is cut or changed afterwards.

The watcher reads all files each time and knows a line by its content. A line that is new but stands before known ones
was changed by somebody else than the node; such lines are counted and not believed.

The history of steps that counts: a crash takes the learner back to its newest checkpoint; steps after that are done
again, by other groups perhaps. What they did the first time is as if it had not been: the weights do not know it. So
the last attempt of each step counts, and none of a step that was not tried again yet.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ftis_node.telemetry.events import event_log_files, present_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

BEGINNINGS = frozenset({"start", "step_lost"})  # after these the learner stands at its checkpoint
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


GARBAGE = b"\xfb"  # the first byte of lines that the fault `trail-garbage` made of events


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
        lines = [line for file in event_log_files(self.path) for line in _lines(file) if not line.startswith(GARBAGE)]
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


@dataclass
class History:
    """`groups` by the step that took them, `reports` by step. `noted`: the last step that was reported, counted or not.
    `saved`: that of the newest complete checkpoint.

    `is_settling`: a life has begun, and not yet taken groups: it stands at a checkpoint that the trail does not name.
    """

    groups: dict[int, list[str]] = field(default_factory=dict)
    reports: dict[int, Event] = field(default_factory=dict)
    noted: int = 0
    saved: int = 0
    is_settling: bool = False
    _open: int | None = None  # the step whose groups are being noted

    @property
    def steps(self) -> tuple[int, int]:
        """The lowest and the highest step that the node may stand at, as far as the trail and its checkpoint tell."""
        return (min(self.saved, self.noted), max(self.saved, self.noted)) if self.is_settling else (self.noted,) * 2

    def add(self, event: Event) -> None:
        """The trail's next event."""
        if event.name in BEGINNINGS:
            self._open, self.is_settling = None, True
        elif event.name == "taken":
            self._take(event["step"], event["group"])
        elif event.name == "step":
            self._report(event["step"], event)

    def _take(self, step: int, group: str) -> None:
        if self._open != step:
            self._drop_from(step)
            self.groups[step] = []
            self._open, self.is_settling = step, False
        self.groups[step].append(group)

    def _report(self, step: int, event: Event) -> None:
        tried_now = self._open == step or self.is_settling  # while settling: by the life before, which did not tell
        self._drop_from(step + 1 if tried_now else step)
        self.reports[step] = event
        self.noted, self._open = step, None

    def _drop_from(self, step: int) -> None:
        """Both are in the order of their steps, so that thousands of steps cost no more than there are to drop."""
        for kept in (self.groups, self.reports):
            while kept and (last := next(reversed(kept))) >= step:
                del kept[last]


def counted(events: Iterable[Event], *, saved: int) -> History:
    """The history of `events`, of a node whose newest complete checkpoint is that of step `saved` (0: none)."""
    history = History(saved=saved)
    for event in events:
        history.add(event)
    if history.is_settling:
        history._drop_from(saved + 1)
    return history
