"""The history of a run as points for curves, read from its event log at once or while the run continues.

Event logs have hundreds of megabytes. So the reader decodes a few fields, and parses a line only if it is a point. The
last few lines are kept as text. If the learner falls back to an older checkpoint, a repeated step replaces the points
from that step on, evaluations too. So the curves show the steps that led to the current weights.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from ftis_node.telemetry.events import EventReader, last_lines
from ftis_node.telemetry.status import EvalStatus, StepFigures

DEFAULT_NUM_LAST_EVENTS = 200
# Every group causes these events, hundreds of times a minute. All others are notable.
ROUTINE = frozenset(
    {"admitted", "announced", "reannounced", "taken", "confirmed", "served", "backfill_requested", "released"}
)
T = TypeVar("T")


class StepPoint(StepFigures, frozen=True, kw_only=True):
    """One step of the learner, from its `step` event. A figure is None if it was not recorded or not finite.

    A step that changed nothing was `skipped` (no signal) or `refused` (a value was not finite), with the reason.
    """

    time: float
    step: int
    own_groups: int | None = None
    foreign_groups: int | None = None
    own_reward_mean: float | None = None
    foreign_reward_mean: float | None = None
    generation_tokens_per_s: float | None = None
    num_tokens: int | None = None
    duration_s: float | None = None
    skipped: str | None = None
    refused: str | None = None

    @property
    def problem(self) -> str | None:
        """Return why the step changed nothing; None if it had an effect."""
        return self.refused or self.skipped


class EvaluationPoint(EvalStatus, frozen=True, kw_only=True):
    """One evaluation, and when it ended."""

    time: float


@dataclass(frozen=True, slots=True)
class History:
    """All steps and evaluations, oldest first, and the last events of any kind as written."""

    steps: tuple[StepPoint, ...] = ()
    evaluations: tuple[EvaluationPoint, ...] = ()
    events: tuple[dict[str, Any], ...] = ()
    damaged_lines: int = 0

    def by_task(self) -> dict[str, list[EvaluationPoint]]:
        tasks: dict[str, list[EvaluationPoint]] = {}
        for point in sorted(self.evaluations, key=lambda point: point.step):
            tasks.setdefault(point.task, []).append(point)
        return tasks


def groups_used(steps: Iterable[StepPoint]) -> tuple[int, int]:
    pairs = [(point.own_groups or 0, point.foreign_groups or 0) for point in steps]
    return sum(own for own, _ in pairs), sum(foreign for _, foreign in pairs)


class HistoryReader:
    """Reader of a history that follows its event log. The last notable events are kept separately, however old."""

    def __init__(self, events_path: Path, *, num_last_events: int = DEFAULT_NUM_LAST_EVENTS) -> None:
        self.history = History()
        self._reader = EventReader(events_path)
        self._num_events = 0
        self._notable_lines: deque[tuple[int, bytes]] = deque(maxlen=num_last_events)
        self._steps: list[StepPoint] = []
        self._evaluations: dict[tuple[int, str], EvaluationPoint] = {}
        self._last_lines: deque[bytes] = deque(maxlen=num_last_events)
        self._damaged_lines = 0

    def poll(self) -> bool:
        """Read the lines appended since the last call into `history`; return whether there were any."""
        num_new = sum(1 for _ in self.read_new())
        if num_new:
            self.history = self.build()
        return num_new > 0

    def read_new(self) -> Iterator[tuple[bytes, EventHead | None]]:
        """Yield the lines appended since the last call, each with its head, None if the line is damaged."""
        for line in self._reader.read_new():
            yield line, self._add(line)

    def _add(self, line: bytes) -> EventHead | None:
        head = read_head(line)
        name = None if head is None else head.event
        try:
            if name == "step":
                step = msgspec.convert(read_event(line), StepPoint)
                self._go_back(step.step - 1)
                self._steps.append(step)
            elif name == "eval":
                point = msgspec.convert(read_event(line), EvaluationPoint)
                self._evaluations[point.step, point.task] = point
        except ValueError:
            name = None
        if name is None:
            self._damaged_lines += 1
            return None
        self._last_lines.append(line)
        if name not in ROUTINE:
            self._notable_lines.append((self._num_events, line))
        self._num_events += 1
        return head

    def _go_back(self, step: int) -> None:
        if self._steps and self._steps[-1].step > step:
            self._steps = [point for point in self._steps if point.step <= step]
            self._evaluations = {key: point for key, point in self._evaluations.items() if point.step <= step}

    def build(self) -> History:
        begin = self._num_events - len(self._last_lines)
        lines = [*(line for number, line in self._notable_lines if number < begin), *self._last_lines]
        events = [event for line in lines if (event := _kept_event(line)) is not None]
        return History(
            steps=tuple(self._steps),
            evaluations=tuple(self._evaluations.values()),
            events=tuple(events),
            damaged_lines=self._damaged_lines + len(lines) - len(events),
        )


class EventHead(msgspec.Struct):
    """The name of an event, and the fields that are counted or that a later start needs."""

    time: float
    event: str
    group: str | None = None
    step: int | None = None
    own: bool = False
    sender: str = ""
    origin: str | None = None
    number: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    num_tokens: int = 0
    num_turns: int = 0
    num_observations: int = 0
    file: str = ""
    reason: str = ""


_DECODER = msgspec.json.Decoder(EventHead)


def read_head(line: bytes) -> EventHead | None:
    """Return the head of the event in a line; None if the line is damaged."""
    try:
        return _DECODER.decode(line)
    except (ValueError, RecursionError):  # JSON with NaN is no damage
        event = event_or_none(line)
    try:
        return msgspec.convert(event, EventHead)
    except msgspec.ValidationError:
        return None


def last_logged_step(path: Path) -> int:
    """Return the learner's last step by the end of the event log at `path`; 0 without a step.

    A step that takes groups is not done yet, also if the learner went back and repeats it.
    """
    step = 0
    for head in filter(None, map(read_head, last_lines(path))):
        if head.event == "step" and head.step is not None:
            step = head.step
        elif head.event == "taken" and head.step is not None:
            step = min(step, head.step - 1)
    return step


def event_or_none(line: bytes) -> dict[str, Any] | None:
    """Return the event in a line; None if the line is damaged."""
    try:
        return read_event(line)
    except ValueError:
        return None


_kept_event = lru_cache(maxsize=4096)(event_or_none)  # a poll builds mostly the events of the one before


def read_event(line: bytes) -> dict[str, Any]:
    """Return the event in a line, with None for NaN and infinity. Raise ValueError for a damaged line."""
    try:
        event = json.loads(line, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(event, dict) or "event" not in event:
        raise ValueError("no event")
    return event


def slices(items: Sequence[T], num: int) -> list[Sequence[T]]:
    """Return the items in `num` slices of about equal length, at most one per item."""
    num = min(num, len(items))
    edges = [round(place * len(items) / num) for place in range(num + 1)] if num else []
    return [items[begin:end] for begin, end in pairwise(edges)]


def thinned(points: Sequence[tuple[float, float]], num: int) -> list[tuple[float, float]]:
    """Return at most `num` points, each the mean of consecutive ones."""
    parts = slices(points, num)
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]
