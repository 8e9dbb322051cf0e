"""One pass over an event log: totals, rates, rejections, notable events. Memory does not grow with the log."""

from __future__ import annotations

from collections import Counter

import msgspec

from ftis_node.report.event_rates import EventRates
from ftis_node.report.timeline import TimelineBuilder, TimelineEntry
from ftis_node.telemetry.former_names import present_reason
from ftis_node.telemetry.history import read_event

MAX_REASONS = 64
COUNTED = {"announced": "announced", "confirmed": "confirmed", "refused": "refused"}
FREQUENT = {"taken", "released", "served", "announced", "confirmed", "admitted", "eval", "reannounced"}


class _Line(msgspec.Struct):
    """Fields of a line that are counted; others are ignored."""

    time: float
    event: str
    own: bool = False
    num_tokens: int = 0
    reason: str = ""


_DECODER = msgspec.json.Decoder(_Line)


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
        ):  # other types under the same names, or a NaN: nothing of it is counted
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
        """Return the notable events and how many were left out. Call it once, at the end."""
        return self._timeline.finish()
