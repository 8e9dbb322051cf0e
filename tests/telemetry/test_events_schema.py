"""Every reader reads event logs of schemas 1 to 3 with the present names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftis_node.replay.group_history import group_events
from ftis_node.report.facts import EventTotals
from ftis_node.swarm.reasons import BEHAVIOUR, REFUSALS
from ftis_node.telemetry.event_log_summary import read_event_log_summary
from ftis_node.telemetry.events import EVENTS, REASONS, read_events, with_present_name
from ftis_node.telemetry.history import read_event, read_head
from tests.chaos.observation.event_log import parse
from tests.telemetry.test_history import read_history

GROUP = "ab" * 32
OLD_LOG = Path(__file__).parents[1] / "node" / "startup" / "old_homes" / "events-4.jsonl"


@pytest.mark.parametrize(("old", "new"), EVENTS.items())
def test_an_old_event_name_is_read_as_the_present_one(old: str, new: str, tmp_path: Path) -> None:
    line = json.dumps({"time": 1.0, "event": old, "file": "x", "group": GROUP}).encode() + b"\n"
    (path := tmp_path / "events.jsonl").write_bytes(line)
    assert [event["event"] for event in read_events(path, name=new)] == [new]
    head = read_head(line)
    assert head is not None and (head.event, read_event(line)["event"]) == (new, new)
    assert [event["event"] for event in read_history(path).events] == [new]
    assert [event["event"] for event in group_events(path, GROUP)] == [new]
    assert (parsed := parse(line)) is not None and parsed.name == new


@pytest.mark.parametrize(("old", "new"), REASONS.items())
def test_an_old_reason_is_read_as_the_present_one(old: str, new: str, tmp_path: Path) -> None:
    refused = {"time": 1.0, "event": "refused", "group": GROUP, "reason": old}
    changed = {"time": 2.0, "event": "standing", "peer": "p", "standing": "watched", "why": f"{old}: {old}"}
    lines = [json.dumps(event).encode() + b"\n" for event in (refused, changed)]
    (path := tmp_path / "events.jsonl").write_bytes(b"".join(lines))
    assert [event["reason"] for event in read_events(path, name="refused")] == [new]
    assert [event["reason"] for event in group_events(path, GROUP)] == [new]
    (event,) = read_events(path, name="reputation_changed")
    assert (event["standing"], event["why"]) == ("probation", f"{new}: {old}")
    totals = EventTotals()
    head = read_head(lines[0])
    assert head is not None
    totals.add(lines[0], head)
    assert totals.refused == {new: 1}


def test_the_reason_of_a_released_group_is_not_renamed() -> None:
    released = {"time": 1.0, "event": "released", "group": GROUP, "reason": "audit"}
    assert with_present_name(released) == released


def test_every_present_reason_has_a_sentence_and_no_former_one() -> None:
    assert set(REASONS.values()) <= REFUSALS.keys() | BEHAVIOUR.keys()
    assert not REASONS.keys() & (REFUSALS.keys() | BEHAVIOUR.keys()), "a former name must not have another meaning"


@pytest.mark.parametrize("lost", [{"event": "buffer_behind"}, {"event": "saved", "file": "replay.sqlite"}])
def test_an_old_log_that_lost_its_buffer_expects_no_group(lost: dict[str, str], tmp_path: Path) -> None:
    admitted = {"time": 1.0, "event": "admitted", "group": GROUP, "sender": "me", "number": 1}
    (path := tmp_path / "events.jsonl").write_text(json.dumps(admitted) + "\n")
    assert len(read_event_log_summary(path).expected) == 1
    path.write_text(path.read_text() + json.dumps({"time": 2.0} | lost) + "\n")
    assert read_event_log_summary(path).expected == []


def test_the_history_is_read_from_a_log_of_schema_1() -> None:
    history, summary = read_history(OLD_LOG), read_event_log_summary(OLD_LOG)
    assert [point.step for point in history.steps] == [1, 2]
    assert [point.step for point in history.evaluations] == [0, 2]
    assert (history.damaged_lines, summary.num_damaged, summary.step) == (0, 0, 2)
    assert len(summary.used) == 10
    assert set(summary.last_numbers.values()) == {21}
