"""Hours of a schedule: ranges over midnight, several ranges, and the two days on which the clocks change."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest

from ftis_node.config.node import NodeSettings
from ftis_node.config.schedule import ScheduleSection, is_within, next_start, parse_hours
from ftis_node.node.pausing import RUN, Command, Decision, decide
from ftis_node.node.supervision.machine_observer import MachineFacts


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Local time with a change to summer time on 2026-03-29, 02:00, and back on 2026-10-25, 03:00."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


def at(text: str) -> float:
    """Return the Unix time of a local time."""
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        ("22-07", ("22:00", "23:59", "00:00", "06:59"), ("07:00", "21:59")),
        ("9-17:30, 22:15-24", ("09:00", "17:29", "22:15", "23:59"), ("08:59", "17:30", "22:14", "00:00")),
    ],
)
def test_hours_of_a_day(hours, inside, outside):
    ranges = parse_hours(hours)
    assert [is_within(ranges, at(f"2026-05-04T{one}")) for one in inside] == [True] * len(inside)
    assert [is_within(ranges, at(f"2026-05-04T{one}")) for one in outside] == [False] * len(outside)


@pytest.mark.parametrize("text", ["22", "22-25", "7-7", "0-24", "22:60-7", "22-07,", "night", "-1-5", "22-7 9-10"])
def test_other_texts_are_refused_in_one_line(text):
    with pytest.raises(ValueError, match="write ranges of hours such as"):
        NodeSettings(model="m", schedule={"hours": text})


@pytest.mark.parametrize(("day", "length_h"), [("2026-03-28", 8.0), ("2026-05-04", 9.0), ("2026-10-24", 10.0)])
def test_the_night_of_a_clock_change_ends_at_seven_too(day, length_h):
    """In minutes of real time, the node runs from 22:00 to 07:00 on the wall."""
    ranges, noon = parse_hours("22-07"), at(f"{day}T12:00")
    minutes = [noon + 60 * number for number in range(26 * 60)]
    running = [minute for minute in minutes if is_within(ranges, minute)]
    assert (running[0], len(running)) == (at(f"{day}T22:00"), length_h * 60)
    assert next_start(ranges, noon) == running[0]
    next_day = datetime.fromisoformat(f"{day}T22:00") + timedelta(days=1)
    assert next_start(ranges, running[-1]) == next_day.timestamp()


def test_the_decision_and_its_reason():
    schedule = ScheduleSection(hours="22-07", when_on_battery="pause", while_running=("steam",))
    noon, night = at("2026-05-04T12:00"), at("2026-05-04T23:00")
    busy = MachineFacts(on_battery=True, programs=("steam",), gpu_users=("blender",))
    free = MachineFacts()

    def decided(now: float, facts: MachineFacts = free, command: Command | None = None) -> Decision:
        return decide(schedule, command or Command(), facts, now=now)

    assert decided(noon) == Decision("outside schedule.hours 22-07", at("2026-05-04T22:00"))
    assert (decided(night), decided(night, busy).reason) == (RUN, "the machine runs on its battery")
    assert decided(night, MachineFacts(programs=("steam",))) == Decision("steam is running")
    assert decided(night, MachineFacts(gpu_users=("blender",))) == RUN, "paused for a fact that no setting names"
    assert decided(noon, busy, Command("run", noon + 1)) == RUN, "the schedule came before a command"
    assert decided(noon, free, Command("run", noon)) == decided(noon), "a command outlived its time"
    assert decided(night, free, Command("pause")) == Decision("by command", None)
    assert decided(night, free, Command("pause", night + 60)).until == night + 60
    long = Command("pause", at("2026-05-05T09:00"))
    assert decided(night, free, long).until == at("2026-05-05T22:00"), "names a time outside the hours as the end"
    other = ScheduleSection(when_gpu_is_used="pause")
    assert decide(other, Command(), busy, now=noon).reason == "steam is running"
    assert decide(other, Command(), MachineFacts(gpu_users=("a", "b")), now=noon).reason == "a, b uses the GPU"
