"""`[schedule]` of node.toml: when the node computes. At all other times it pauses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, time, timedelta
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, field_validator

from ftis_node.config.section import Section

RANGE = re.compile(r"(\d{1,2})(?::(\d{2}))?-(\d{1,2})(?::(\d{2}))?")
HOUR, DAY = 60, 24 * 60  # in minutes
FORM = "write ranges of hours such as 22-07 or 12:30-14, separated by commas"
AtConflict = Literal["run", "pause"]
ProgramName = Annotated[str, Field(min_length=1, max_length=128)]


class HourRange(NamedTuple):
    """A range of local time in minutes after midnight. It goes over midnight if `end` is not after `start`."""

    start: int
    end: int

    def contains(self, minute: int) -> bool:
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end


def parse_hours(text: str) -> tuple[HourRange, ...]:
    """Return the ranges of `22-07, 12:30-14`; none for "". Raises ValueError."""
    return tuple(_range_of(part.strip()) for part in text.split(",")) if text.strip() else ()


def _range_of(text: str) -> HourRange:
    match = RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a range of hours: {FORM}")
    hours, minutes = (int(match[1]), int(match[3])), (int(match[2] or 0), int(match[4] or 0))
    start, end = (HOUR * hour + minute for hour, minute in zip(hours, minutes, strict=True))
    if max(minutes) >= HOUR or max(start, end) > DAY or start % DAY == end % DAY:
        raise ValueError(f"{text!r} is not a range of hours within a day: {FORM}")
    return HourRange(start % DAY, end)


def is_within(ranges: Sequence[HourRange], now: float) -> bool:
    """Return whether the Unix time `now` is in one of the ranges, by local time."""
    local = datetime.fromtimestamp(now)  # naive: hours on the wall clock, whatever the change to summer time does
    return any(each.contains(HOUR * local.hour + local.minute) for each in ranges)


def next_start(ranges: Sequence[HourRange], after: float) -> float:
    """Return the Unix time of the first start of a range after `after`."""
    today = datetime.fromtimestamp(after).date()
    days = (today + timedelta(days=number) for number in range(3))
    starts = (datetime.combine(day, time(*divmod(each.start, HOUR))).timestamp() for day in days for each in ranges)
    return min(start for start in starts if start > after)


class ScheduleSection(Section):
    """When the node generates and trains. Otherwise it pauses: memory is free, and peers are served."""

    hours: str = Field(default="", max_length=256)
    """Hours of the day, in local time, such as `22-07` or `22:30-07, 12-13`. Empty: all."""
    when_on_battery: AtConflict = "run"
    """`pause`: while the machine runs on its battery."""
    while_running: tuple[ProgramName, ...] = Field(default=(), max_length=64)
    """Names of programs, such as `steam`: the node pauses while one of them runs, and a minute longer."""
    when_gpu_is_used: AtConflict = "run"
    """`pause`: while another program computes on a GPU of the node, or uses 1 GiB of it, and a minute longer. Requires
    the extra `gpu-figures`, or vLLM."""

    @field_validator("hours")
    @classmethod
    def _are_ranges(cls, value: str) -> str:
        parse_hours(value)
        return value
