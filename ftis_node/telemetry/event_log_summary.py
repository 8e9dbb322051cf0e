"""Summary of the event log of a node's earlier processes. The node needs it at its start.

The node writes a line after its event, so the log is never ahead of the replay buffer. If it is ahead, the buffer has
lost its last commits (a torn write-ahead log, a restored backup), and the node replaces the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ftis_node.telemetry.events import EventReader
from ftis_node.telemetry.history import read_event, read_head

if TYPE_CHECKING:
    from pathlib import Path

MAX_GROUPS = 16_384  # the newest ones; older groups are rejected for their age anyway
NUM_DROPPED = MAX_GROUPS // 16
MAX_EVALUATIONS = 4096


class LoggedGroup(NamedTuple):
    """A group in the log. `sender` is "" and `number` 0 if the log no longer has its admission."""

    id: bytes
    sender: str = ""
    number: int = 0
    step: int | None = None  # the step that used the group


@dataclass(slots=True)
class EventLogSummary:
    """Summary of all lines so far.

    `last_numbers` are the last sequence numbers of own groups, by the peer id that this node had then.
    `skipped_numbers` counts the numbers below these that no own group has. `evaluations` are the events as written. If
    the learner loses a step, the step does not count as done. Its groups count as used only if a later line shows that
    the step was done.
    """

    step: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    last_numbers: dict[str, int] = field(default_factory=dict)
    skipped_numbers: int = 0
    num_damaged: int = 0
    _admitted: dict[str, tuple[str, int]] = field(default_factory=dict)
    _expected: dict[str, tuple[str, int]] = field(default_factory=dict)  # admitted since the buffer last lost groups
    _taken: dict[str, int] = field(default_factory=dict)  # group: the current step, which took it
    _in_doubt: dict[str, int] = field(default_factory=dict)  # group: a step that a crash interrupted
    _used: dict[str, int] = field(default_factory=dict)
    _released: dict[str, str] = field(default_factory=dict)  # group: the reason why it was dropped unused

    @property
    def used(self) -> list[LoggedGroup]:
        """Return the groups that steps have used according to the log, oldest first."""
        known = self._admitted
        origins = {name: known.get(name, ("", 0)) for name in self._used}
        return [LoggedGroup(bytes.fromhex(name), *origins[name], step) for name, step in self._used.items()]

    @property
    def admitted(self) -> list[LoggedGroup]:
        """Return the newest groups that the buffer has ever admitted."""
        return [LoggedGroup(bytes.fromhex(name), *origin) for name, origin in self._admitted.items()]

    @property
    def last_number(self) -> int:
        """Return the highest sequence number of an own group, under any identity; 0 before the first."""
        return max(self.last_numbers.values(), default=0)

    @property
    def expected(self) -> list[LoggedGroup]:
        """Return the groups that the buffer should know: those admitted since its last known loss."""
        return [LoggedGroup(bytes.fromhex(name), *origin) for name, origin in self._expected.items()]

    @property
    def released(self) -> list[tuple[bytes, str]]:
        """Return the groups that were dropped unused, with the reasons."""
        return [(bytes.fromhex(name), reason) for name, reason in self._released.items()]

    def add(self, data: bytes) -> None:
        line = read_head(data)
        if line is None or (line.event == "step" and line.step is None):
            self.num_damaged += 1
            return
        name = line.event
        if name == "admitted" and line.group:
            _put(self._admitted, line.group, (line.sender, line.number))
            _put(self._expected, line.group, (line.sender, line.number))
            self._released.pop(line.group, None)  # the buffer had lost the group and admitted it again
            if line.own:
                self.skipped_numbers += max(0, line.number - self.last_number - 1)
                self.last_numbers[line.sender] = max(line.number, self.last_numbers.get(line.sender, 0))
        elif name == "taken" and line.group and line.step is not None:
            self._begin(line.step)
            _put(self._taken, line.group, line.step)  # an exchange node writes no line that ends a step
            if line.sender:  # repeated here, because the admission's line may be damaged
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
            self._add_evaluation(read_event(data))

    def _add_evaluation(self, event: dict[str, Any]) -> None:
        """Add an evaluation. Above the limit, drop the oldest after the first, which is the baseline."""
        self.evaluations.append(event)
        if len(self.evaluations) > MAX_EVALUATIONS:
            del self.evaluations[1]

    def _begin(self, step: int) -> None:
        """Note that a step takes groups. If the learner repeats a step, the step is no longer done."""
        self._in_doubt.clear()
        if step <= self.step:
            self._used = {name: at for name, at in self._used.items() if at < step}
            self.step = step - 1

    def _add_step(self, step: int) -> None:
        if step <= self.step:  # the learner went back to a checkpoint and returned the groups used since
            self._used = {name: at for name, at in self._used.items() if at < step}
        for name, at in self._in_doubt.items():
            if at == step:
                _put(self._used, name, at)
        for name, at in self._taken.items():
            if at <= step:  # an earlier one if the line of that step is damaged
                _put(self._used, name, at)
        self._taken.clear()
        self._in_doubt.clear()
        self.step = step


def read_event_log_summary(path: Path) -> EventLogSummary:
    """Return the summary of the log at `path` with its rotated files; an empty one if there is no log."""
    summary = EventLogSummary()
    for line in EventReader(path).read_new():
        summary.add(line)
    return summary


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    """Add the newest item at the end. Above `MAX_GROUPS` drop the oldest in bulk: a first key is slow to find."""
    table.pop(name, None)
    table[name] = value
    if len(table) > MAX_GROUPS:
        for oldest in list(islice(table, NUM_DROPPED)):
            del table[oldest]
