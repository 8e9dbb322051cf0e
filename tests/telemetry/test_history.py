"""The history says what the trail says: over turned-over files, beside a writer, through damage and repeated steps."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from ftis_node.telemetry.events import EventLog
from ftis_node.telemetry.history import EvaluationPoint, History, HistoryReader

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def read_history(path: Path) -> History:
    """The history of the whole log at `path`."""
    follower = HistoryReader(path)
    follower.poll()
    return follower.history


def test_points_have_the_events_figures_and_none_where_there_is_none(path: Path) -> None:
    with closing(EventLog(path)) as trail:
        trail.write("step", step=1, reward_mean=0.25, loss=float("nan"), own_groups=3, foreign_groups=5, refused="loss")
        trail.write("eval", step=1, task="arithmetic", pass_at_1=0.5, n=16)
    history = read_history(path)
    (point,) = history.steps
    assert (point.step, point.reward_mean, point.own_groups, point.foreign_groups) == (1, 0.25, 3, 5)
    assert (point.loss, point.mean_kl, point.problem) == (None, None, "loss")
    (evaluation,) = history.evaluations
    assert evaluation == EvaluationPoint(evaluation.time, 1, "arithmetic", 0.5, 16)
    assert [event["event"] for event in history.events] == ["step", "eval"]
    assert history.damaged_lines == 0


def test_no_trail_is_an_empty_history(path: Path) -> None:
    assert read_history(path) == History()
    assert HistoryReader(path).poll() is False


def test_a_damaged_line_is_passed_over_and_counted(path: Path) -> None:
    path.write_bytes(
        b'{"time":1,"event":"step","step":1}\n'
        b'{"time":2,"ev{"time":3,"event":"step","step":2}\n'
        b"\xff\xfe\n[1]\n"
        b'{"time":4,"event":"eval","step":2}\n'
        b'{"time":5,"event":"step","step":3}\n'
        b'{"time":6,"event":"step","st'
    )
    history = read_history(path)
    assert [point.step for point in history.steps] == [1, 3]
    assert history.damaged_lines == 4


def test_a_step_that_was_done_again_takes_the_place_of_what_stood_there(path: Path) -> None:
    with closing(EventLog(path)) as trail:
        for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25), (3, 0.35)):
            trail.write("step", step=step, reward_mean=reward)
    assert [(point.step, point.reward_mean) for point in read_history(path).steps] == [(1, 0.1), (2, 0.25), (3, 0.35)]


def test_a_follower_reads_each_line_once_also_through_turn_overs(path: Path) -> None:
    follower = HistoryReader(path, num_last_events=4)
    with closing(EventLog(path, max_bytes=200, kept_files=5)) as trail:
        for step in range(1, 31):
            trail.write("step", step=step)
            if step % 7 == 0:
                assert follower.poll() is True
                assert follower.poll() is False
    follower.poll()
    assert len(list(path.parent.iterdir())) == 6
    assert [point.step for point in follower.history.steps] == list(range(1, 31))
    assert [event["step"] for event in follower.history.events] == [27, 28, 29, 30]
    assert follower.history.damaged_lines == 0


def test_notable_events_are_kept_however_many_others_follow(path: Path) -> None:
    with closing(EventLog(path)) as trail:
        for step in range(1, 5):
            trail.write("ban", peer=f"peer-{step}")
            for _ in range(20):
                trail.write("admitted", step=step)
    follower = HistoryReader(path, num_last_events=3)
    follower.poll()
    events = [(event["event"], event.get("peer", event.get("step"))) for event in follower.history.events]
    assert events == [("ban", "peer-2"), ("ban", "peer-3"), ("ban", "peer-4"), *[("admitted", 4)] * 3]
    with closing(EventLog(path)) as trail:
        trail.write("ban", peer="peer-5")
    follower.poll()
    assert [event["event"] for event in follower.history.events][-2:] == ["admitted", "ban"], "none is shown twice"
    assert len(follower.history.events) == 5
    assert follower.history.damaged_lines == 0


def test_all_turned_over_files_are_read_the_oldest_first(path: Path) -> None:
    with closing(EventLog(path, max_bytes=120)) as trail:
        for step in range(1, 9):
            trail.write("step", step=step)
    assert path.with_name("events.jsonl.3").exists()
    assert [point.step for point in read_history(path).steps] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_half_written_line_waits_for_its_end(path: Path) -> None:
    path.write_bytes(b'{"time":1,"event":"step","st')
    follower = HistoryReader(path)
    assert follower.poll() is False
    with path.open("ab") as file:
        file.write(b'ep":1}\n')
    assert follower.poll() is True
    assert [point.step for point in follower.history.steps] == [1]
