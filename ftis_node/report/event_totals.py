"""Totals of an event log in one pass: counts, rates, rejections, notable events. Memory does not grow with the log."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from ftis_node.report.timeline import TimelineBuilder, TimelineEntry
from ftis_node.telemetry.former_names import present_reason
from ftis_node.telemetry.history import read_event

MAX_REASONS = 64
MAX_BUCKETS = 120
COUNTED = {"announced": "announced", "confirmed": "confirmed", "refused": "refused"}
FREQUENT = {"taken", "released", "served", "announced", "confirmed", "admitted", "eval", "reannounced"}


class _Line(msgspec.Struct):
    """Fields of a line that are counted; all others are ignored."""

    time: float
    event: str
    own: bool = False
    num_tokens: int = 0
    reason: str = ""


_DECODER = msgspec.json.Decoder(_Line)


@dataclass(slots=True)
class EventRates:
    """Histogram of events over time with a fixed number of buckets; their width doubles when the time exceeds them.

    `counts` is by kind. `width_s` is the width of a bucket, `began_at` the start of the first one (Unix s).
    """

    began_at: float | None = None
    width_s: float = 1.0
    counts: dict[str, list[int]] = field(default_factory=dict)

    def count(self, kind: str, at: float) -> None:
        """Count one event. If a clock was set back, a time before the first event counts as that of the first."""
        if self.began_at is None:
            self.began_at = at
        while (place := int(max(0.0, at - self.began_at) / self.width_s)) >= MAX_BUCKETS:
            self.width_s *= 2
            self.counts = {
                name: [sum(pair) for pair in zip(buckets[::2], [*buckets[1::2], 0], strict=False)]
                for name, buckets in self.counts.items()
            }
        buckets = self.counts.setdefault(kind, [])
        buckets.extend([0] * (place + 1 - len(buckets)))
        buckets[place] += 1

    def rates(self, kind: str) -> list[tuple[float, float]]:
        """Return (middle of the bucket in Unix s, events per minute) for all buckets up to the last event."""
        if self.began_at is None:
            return []
        num_buckets = max(len(buckets) for buckets in self.counts.values())
        found = self.counts.get(kind, [])
        padded = found + [0] * (num_buckets - len(found))
        return [(self.began_at + (place + 0.5) * self.width_s, n * 60 / self.width_s) for place, n in enumerate(padded)]

    def total(self, kind: str) -> int:
        """Return the number of events of a kind."""
        return sum(self.counts.get(kind, ()))


class EventTotals:
    """Accumulator over the lines of an event log, in their order."""

    def __init__(self) -> None:
        self.traffic = EventRates()
        self.refused: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()  # completion tokens by "made" and "received"
        self.num_events = 0
        self.num_unreadable = 0
        self.began_at: float | None = None
        self.ended_at: float | None = None
        self._timeline = TimelineBuilder()

    def add(self, line: bytes, name: str) -> None:
        """Add one line with its event's name. A line that is nested too deep is counted as unreadable."""
        self.num_events += 1
        try:
            self._add(line, name)
        except ValueError:
            self.num_unreadable += 1

    def _add(self, line: bytes, name: str) -> None:
        try:
            decoded = _DECODER.decode(line)
        except (
            msgspec.DecodeError,
            UnicodeDecodeError,
            RecursionError,
        ):  # wrong types or a NaN: the whole line is not counted
            event = read_event(line)
            decoded = _Line(time=float(event["time"]), event=name)
        self.began_at = decoded.time if self.began_at is None else self.began_at
        self.ended_at = decoded.time
        if name == "admitted":
            kind = "made" if decoded.own else "received"
            self.traffic.count(kind, decoded.time)
            self.tokens[kind] += decoded.num_tokens
        elif name in COUNTED:
            self.traffic.count(COUNTED[name], decoded.time)
        reason = present_reason(decoded.reason)
        if name == "refused" and (reason in self.refused or len(self.refused) < MAX_REASONS):
            self.refused[reason] += 1
        if name not in FREQUENT:
            self._timeline.add(read_event(line))

    def timeline(self) -> tuple[list[TimelineEntry], int]:
        """Return the notable events and the number of omitted ones. Call it once, at the end."""
        return self._timeline.finish()
