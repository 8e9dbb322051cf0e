"""What a node has recorded: its event log, its replay buffer without envelopes, and its bans.

The event log is read repeatedly. Every line is kept once, even if the file is truncated or changed later. Each read
covers all files and recognizes a line by its content. A new line before known lines was not written by the node and is
ignored.

After a crash the learner resumes at its newest checkpoint and repeats the later steps, perhaps with other groups. The
weights do not contain the first attempt. So the effective history has only the last attempt of each step, and no step
that was not repeated yet.
"""

import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftis_node.telemetry.events import event_log_files

RESTARTS = frozenset({"start", "step_lost"})  # after these the learner resumes at its checkpoint
FIELDS = {
    "start": ("peer",),
    "admitted": ("group", "own", "sender", "number", "policy_version"),
    "confirmed": ("group", "peer"),
    "taken": ("group", "step"),
    "released": ("group",),
    "step": ("step", "policy_version"),
    "served": ("version",),
    "recovered": ("file",),
}  # the fields of each event that an invariant reads; a line without one is damaged


@dataclass(frozen=True, slots=True)
class Event:
    """One line, with the fields that an invariant reads."""

    name: str
    time: float = 0.0
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]


def parse(line: bytes) -> Event | None:
    try:
        found = json.loads(line)
        name = str(found["event"])
        fields = {key: found[key] for key in FIELDS.get(name, ())}
        return Event(name, float(found["time"]), fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


GARBAGE = b"\xfb"  # the first byte of the lines that the fault `event-log-garbage` wrote


@dataclass
class EventLogMemory:
    """All events that were read from the event log at `path`, in order."""

    path: Path
    events: list[Event] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)  # complete lines that are no events
    is_torn: bool = False  # the newest file does not end with a newline
    _seen: set[int] = field(default_factory=set)

    def read(self) -> None:
        lines = [line for file in event_log_files(self.path) for line in _lines(file) if not line.startswith(GARBAGE)]
        self.is_torn = bool(lines) and not lines[-1].endswith(b"\n")
        complete = lines[:-1] if self.is_torn else lines
        known = [hash(line) in self._seen for line in complete]
        first_new = len(known) - known[::-1].index(True) if True in known else 0
        for line in complete[first_new:]:
            self._seen.add(hash(line))
            if (event := parse(line)) is None:
                self.damaged.append(line[:120].decode(errors="replace").rstrip())
            else:
                self.events.append(event)


def _lines(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:  # rotated a moment ago
        return []


@dataclass
class History:
    """The groups and the report of each step.

    `reported` is the last reported step, effective or not. `saved` is the step of the newest complete checkpoint.
    `is_resuming`: the learner has restarted and has taken no groups yet. Its checkpoint is not in the event log.
    """

    groups: dict[int, list[str]] = field(default_factory=dict)
    reports: dict[int, Event] = field(default_factory=dict)
    reported: int = 0
    saved: int = 0
    is_resuming: bool = False
    _open: int | None = None  # the step whose groups are being logged

    @property
    def steps(self) -> tuple[int, int]:
        """The lowest and the highest possible step of the node, by its event log and checkpoint."""
        if self.is_resuming:
            return min(self.saved, self.reported), max(self.saved, self.reported)
        return self.reported, self.reported

    def add(self, event: Event) -> None:
        if event.name in RESTARTS:
            self._open, self.is_resuming = None, True
        elif event.name == "taken":
            self._take(event["step"], event["group"])
        elif event.name == "step":
            self._report(event["step"], event)

    def _take(self, step: int, group: str) -> None:
        if self._open != step:
            self._drop_from(step)
            self.groups[step] = []
            self._open, self.is_resuming = step, False
        self.groups[step].append(group)

    def _report(self, step: int, event: Event) -> None:
        # While resuming, the report is of a step that the former process finished without logging it.
        is_current = self._open == step or self.is_resuming
        self._drop_from(step + 1 if is_current else step)
        self.reports[step] = event
        self.reported, self._open = step, None

    def _drop_from(self, step: int) -> None:
        """Both are ordered by step, so the cost depends only on the number of dropped steps."""
        for kept in (self.groups, self.reports):
            while kept and (last := next(reversed(kept))) >= step:
                del kept[last]


def effective_history(events: Iterable[Event], *, saved: int) -> History:
    """Return the effective history of `events`. `saved` is the step of the newest complete checkpoint (0: none)."""
    history = History(saved=saved)
    for event in events:
        history.add(event)
    if history.is_resuming:
        history._drop_from(saved + 1)
    return history


BUSY_S = 20.0


@dataclass(frozen=True, slots=True)
class Row:
    """One stored group; `id` is hex."""

    id: str
    own: bool
    sender: str
    number: int
    state: str
    reason: str | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Buffer:
    """All rows, and the sequence numbers of pruned groups as (first, last) by sender.

    `integrity_error` is the result of SQLite's check of the file, or "".
    """

    rows: tuple[Row, ...] = ()
    pruned: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    last_number: int = 0
    integrity_error: str = ""

    def has_pruned(self, sender: str, number: int) -> bool:
        return any(first <= number <= last for first, last in self.pruned.get(sender, ()))


def read_buffer(path: Path) -> Buffer | None:
    """Return the buffer at `path`, or None. An unreadable file gives a buffer with an `integrity_error`."""
    if not path.exists():
        return None
    try:
        with closing(_opened(path)) as connection:
            connection.execute("BEGIN")
            return _read(connection)
    except sqlite3.Error as error:
        return Buffer(integrity_error=str(error))


def _read(connection: sqlite3.Connection) -> Buffer:
    rows = connection.execute("SELECT hex(id), own, sender, number, state, reason, step FROM groups ORDER BY arrival")
    groups = tuple(Row(name.lower(), bool(own), *rest) for name, own, *rest in rows)
    pruned: dict[str, tuple[tuple[int, int], ...]] = {}
    for sender, number in connection.execute("SELECT sender, number FROM forgotten"):
        pruned[sender] = (*pruned.get(sender, ()), (number, number))
    totals = dict(connection.execute("SELECT name, value FROM totals"))
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    return Buffer(groups, pruned, totals.get("last_number", 0), "" if verdict == "ok" else str(verdict))


def read_bans(path: Path) -> dict[str, float]:
    """Return the banned peers in the database at `path` with the ends of their bans; nothing if it is unreadable."""
    try:
        with closing(_opened(path)) as connection:
            return dict(connection.execute("SELECT peer_id, banned_until FROM peers WHERE banned_until > 0"))
    except sqlite3.Error:
        return {}


def _opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)
