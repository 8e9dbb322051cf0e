"""Trail summary: what the event trail holds of a node's former starts, read once when the node starts.

A line is written after its event, so the trail is never ahead of the buffer. If it is, the buffer has lost its last
commits (a torn write-ahead log, a file from a backup), and the node replaces it. The trail holds the last sequence
number of own groups.

Damaged lines are skipped and counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ftis_node.telemetry.events import EventReader
from ftis_node.telemetry.former_names import present_name
from ftis_node.telemetry.history import read_event

if TYPE_CHECKING:
    from pathlib import Path

MAX_GROUPS = 16_384  # the newest: what is older is stale, and refused for its age


class LoggedGroup(NamedTuple):
    """A group as the trail knows it; `sender` is "" and `number` 0 if its admission is no longer there."""

    id: bytes
    sender: str = ""
    number: int = 0
    step: int | None = None  # that used it


class _Line(msgspec.Struct):
    """The fields that matter here."""

    event: str
    group: str | None = None
    step: int | None = None
    own: bool | None = None
    sender: str = ""
    number: int = 0
    file: str = ""
    reason: str = ""


_DECODER = msgspec.json.Decoder(_Line)


@dataclass(slots=True)
class EventLogSummary:
    """`last_numbers` are those of own groups, by the peer id that this node had. `evaluations` are events as written.

    A step that the learner lost is not done; its groups are used only if it was found to be done after all.
    """

    step: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    last_numbers: dict[str, int] = field(default_factory=dict)
    num_damaged: int = 0
    _admitted: dict[str, tuple[str, int]] = field(default_factory=dict)
    _expected: dict[str, tuple[str, int]] = field(default_factory=dict)  # of these, since the buffer last lost any
    _taken: dict[str, int] = field(default_factory=dict)  # by the step under way
    _in_doubt: dict[str, int] = field(default_factory=dict)  # by one that an end cut off
    _used: dict[str, int] = field(default_factory=dict)
    _released: dict[str, str] = field(default_factory=dict)  # unused, by reason

    @property
    def used(self) -> list[LoggedGroup]:
        """The groups that steps have used, by the trail's word, the oldest first."""
        known = self._admitted
        origins = {name: known.get(name, ("", 0)) for name in self._used}
        return [LoggedGroup(bytes.fromhex(name), *origins[name], step) for name, step in self._used.items()]

    @property
    def admitted(self) -> list[LoggedGroup]:
        """The newest groups that the buffer has ever had."""
        return [LoggedGroup(bytes.fromhex(name), *origin) for name, origin in self._admitted.items()]

    @property
    def last_number(self) -> int:
        """The highest sequence number of an own group, under any identity; 0 before the first."""
        return max(self.last_numbers.values(), default=0)

    @property
    def expected(self) -> list[LoggedGroup]:
        """The groups that the buffer has, or has had: what it is known to have lost already is not among them."""
        return [LoggedGroup(bytes.fromhex(name), *origin) for name, origin in self._expected.items()]

    @property
    def released(self) -> list[tuple[bytes, str]]:
        """The groups that were given up unused, and why."""
        return [(bytes.fromhex(name), reason) for name, reason in self._released.items()]

    def add(self, data: bytes) -> None:
        """One line of the trail."""
        try:
            line = _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._add_unusual(data)
            return
        name = present_name(line.event)
        if name == "admitted" and line.group:
            _put(self._admitted, line.group, (line.sender, line.number))
            _put(self._expected, line.group, (line.sender, line.number))
            self._released.pop(line.group, None)  # a buffer that had lost it took it again
            if line.own:
                self.last_numbers[line.sender] = max(line.number, self.last_numbers.get(line.sender, 0))
        elif name == "taken" and line.group and line.step is not None:
            self._begin(line.step)
            self._taken[line.group] = line.step
            if line.sender:  # a second time, for the line of its admission may be damaged
                _put(self._admitted, line.group, (line.sender, line.number))
        elif name == "released" and line.group:
            _put(self._released, line.group, line.reason)
        elif name in ("start", "step_lost"):
            self._in_doubt |= self._taken
            self._taken.clear()
        elif name == "step" and line.step is not None:
            self._add_step(line.step)
        elif name == "buffer_rolled_back" or (name == "recovered" and line.file == "replay.sqlite"):
            self._expected.clear()
        elif name == "eval":
            self.evaluations.append(read_event(data))

    def _add_unusual(self, data: bytes) -> None:
        """Add a line with a figure that is NaN, which the strict JSON reader refuses; else the line is damaged."""
        try:
            event = read_event(data)
            if event["event"] == "step":
                self._add_step(int(event["step"]))
        except (ValueError, KeyError, TypeError):
            self.num_damaged += 1

    def _begin(self, step: int) -> None:
        """Note that a step takes groups. If the learner fell back before it, it is not done until its next line."""
        self._in_doubt.clear()
        if step <= self.step:
            self._used = {name: at for name, at in self._used.items() if at < step}
            self.step = step - 1

    def _add_step(self, step: int) -> None:
        if step <= self.step:  # the learner fell back: what it had used since was given back
            self._used = {name: at for name, at in self._used.items() if at < step}
        for name, at in self._in_doubt.items():
            if at == step:
                _put(self._used, name, at)
        for name, at in self._taken.items():
            if at <= step:  # below it where the line of that step is damaged
                _put(self._used, name, at)
        self._taken.clear()
        self._in_doubt.clear()
        self.step = step


def read_event_log_summary(path: Path) -> EventLogSummary:
    """Return the summary of the trail at `path`, with rotated files; an empty one without a trail."""
    remembered = EventLogSummary()
    for line in EventReader(path).read_new():
        remembered.add(line)
    return remembered


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    """Put the newest last, and keep the number bounded."""
    table.pop(name, None)
    table[name] = value
    if len(table) > MAX_GROUPS:
        del table[next(iter(table))]
