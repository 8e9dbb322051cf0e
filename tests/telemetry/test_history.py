"""The history read from an event log: rotated files, a concurrent writer, damaged lines, repeated steps."""

from contextlib import closing
from pathlib import Path

import pytest

from ftis_node.telemetry.events import EventLog, last_lines
from ftis_node.telemetry.history import EvaluationPoint, History, HistoryReader, last_logged_step


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def read_history(path: Path) -> History:
    """Return the history of the whole log at `path`."""
    reader = HistoryReader(path)
    reader.poll()
    return reader.history


def test_points_have_the_figures_of_their_events_and_none_for_missing_ones(path):
    with closing(EventLog(path)) as events:
        events.write(
            "step", step=1, reward_mean=0.25, loss=float("nan"), own_groups=3, foreign_groups=5, refused="loss"
        )
        events.write("eval", step=1, task="arithmetic", pass_at_1=0.5, n=16)
    history = read_history(path)
    (point,) = history.steps
    assert (point.step, point.reward_mean, point.own_groups, point.foreign_groups) == (1, 0.25, 3, 5)
    assert (point.loss, point.mean_kl, point.problem) == (None, None, "loss")
    (evaluation,) = history.evaluations
    assert evaluation == EvaluationPoint(time=evaluation.time, step=1, task="arithmetic", pass_at_1=0.5, n=16)
    assert [event["event"] for event in history.events] == ["step", "eval"]
    assert history.damaged_lines == 0


def test_the_last_logged_step_is_that_of_the_present_weights(path):
    assert last_logged_step(path) == 0
    with closing(EventLog(path)) as events:
        for step in (1, 2):
            events.write("taken", group="ab", step=step)
            events.write("step", step=step, loss=float("nan"))
        events.write("taken", group="cd", step=3)
        assert last_logged_step(path) == 2, "step 3 is not done"
        events.write("taken", group="cd", step=2)
        assert last_logged_step(path) == 1, "the learner went back"


def test_the_last_lines_are_whole_and_cross_a_rotated_file(path):
    path.with_name("events.jsonl.2").write_bytes(b"oldest\n")
    path.with_name("events.jsonl.1").write_bytes(b"1 first\n1 last\n")
    path.write_bytes(b"2 first\n2 last\n2 ha")
    assert last_lines(path) == [b"1 first\n", b"1 last\n", b"2 first\n", b"2 last\n"]
    assert last_lines(path, num_bytes=14) == [b"1 last\n", b"2 last\n"]


def test_a_damaged_line_is_skipped_and_counted(path):
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


def test_a_repeated_step_replaces_the_earlier_one(path):
    with closing(EventLog(path)) as events:
        for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25), (3, 0.35)):
            events.write("step", step=step, reward_mean=reward)
    assert [(point.step, point.reward_mean) for point in read_history(path).steps] == [(1, 0.1), (2, 0.25), (3, 0.35)]


def test_a_repeated_step_removes_the_evaluations_of_the_lost_weights(path):
    with closing(EventLog(path)) as events:
        for step in (1, 2, 3, 4, 2):
            events.write("step", step=step)
            if step in (1, 3, 4):
                events.write("eval", step=step, task="arithmetic", pass_at_1=0.5, n=16)
        events.write("eval", step=2, task="arithmetic", pass_at_1=0.25, n=16)
    assert [(point.step, point.pass_at_1) for point in read_history(path).evaluations] == [(1, 0.5), (2, 0.25)]


def test_a_reader_reads_each_line_once_while_files_rotate(path):
    reader = HistoryReader(path, num_last_events=4)
    with closing(EventLog(path, max_bytes=200, kept_files=5)) as events:
        for step in range(1, 31):
            events.write("step", step=step)
            if step % 7 == 0:
                assert reader.poll() is True
                assert reader.poll() is False
    reader.poll()
    assert len(list(path.parent.iterdir())) == 6
    assert [point.step for point in reader.history.steps] == list(range(1, 31))
    assert [event["step"] for event in reader.history.events] == [27, 28, 29, 30]
    assert reader.history.damaged_lines == 0


def test_notable_events_are_kept_among_many_others(path):
    with closing(EventLog(path)) as events:
        for step in range(1, 5):
            events.write("ban", peer=f"peer-{step}")
            for _ in range(20):
                events.write("admitted", step=step)
    reader = HistoryReader(path, num_last_events=3)
    reader.poll()
    shown = [(event["event"], event.get("peer", event.get("step"))) for event in reader.history.events]
    assert shown == [("ban", "peer-2"), ("ban", "peer-3"), ("ban", "peer-4"), *[("admitted", 4)] * 3]
    with closing(EventLog(path)) as events:
        events.write("ban", peer="peer-5")
    reader.poll()
    assert [event["event"] for event in reader.history.events][-2:] == ["admitted", "ban"], "no event is shown twice"
    assert len(reader.history.events) == 5
    assert reader.history.damaged_lines == 0


def test_an_incomplete_line_is_read_after_its_end_is_written(path):
    path.write_bytes(b'{"time":1,"event":"step","st')
    reader = HistoryReader(path)
    assert reader.poll() is False
    with path.open("ab") as file:
        file.write(b'ep":1}\n')
    assert reader.poll() is True
    assert [point.step for point in reader.history.steps] == [1]
