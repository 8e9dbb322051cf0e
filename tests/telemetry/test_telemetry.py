"""The event log over rotations and incomplete lines, the history read from it, JSON log lines, fields of the status."""

import json
import logging
from contextlib import closing
from pathlib import Path

import msgspec
import psutil
import pytest

from ftis_node.telemetry.events import EventLog, event_log_files, last_lines, read_events
from ftis_node.telemetry.history import EvaluationPoint, History, HistoryReader, last_logged_step
from ftis_node.telemetry.log import JsonFormatter
from ftis_node.telemetry.status import EvalStatus, Status, SwarmStatus

REQUIRED_FIELDS = {
    "node": {"peer_id", "name", "version", "role", "state", "uptime_s", "addresses"},
    "run": {"id", "name", "method", "task"},
    "model": {"name", "parameters", "trainable_parameters", "tokenizer_fingerprint", "policy_version"},
    "generation": {"engine", "state", "tokens_per_s", "groups_made", "tokens_made", "restarts"},
    "learner": {
        "state", "step", "loss", "reward_mean", "kept_fraction", "truncated_fraction", "mean_kl", "grad_norm",
        "tokens_per_s", "own_groups", "foreign_groups", "restarts",
    },
    "swarm": {
        "state", "reason", "peers_known", "peers_connected", "groups_sent", "groups_confirmed", "groups_received",
        "groups_refused", "groups_repaired", "bytes_in", "bytes_out", "bytes_per_token",
    },
    "replay": {"waiting", "ready", "taken", "released", "tokens", "disk_bytes"},
}  # fmt: skip


def test_the_status_has_all_required_fields():
    document = json.loads(Status(eval=[EvalStatus(step=5, task="gsm8k", pass_at_1=0.5, n=10)]).to_json())
    assert document["schema"] == 1
    for section, keys in REQUIRED_FIELDS.items():
        assert keys <= set(document[section]), section
    assert document["eval"][0].items() >= {"step": 5, "task": "gsm8k", "pass_at_1": 0.5, "n": 10}.items()


def test_the_status_is_read_unchanged_and_damage_is_an_error():
    status = Status(swarm=SwarmStatus(groups_refused={"reward_mismatch": 2}, bytes_per_token=8.25))
    assert Status.from_json(status.to_json()) == status
    with pytest.raises(msgspec.DecodeError):
        Status.from_json(b'{"schema": "one"}')


def test_events_of_a_group_are_found_by_its_id(tmp_path):
    events = EventLog(tmp_path / "events.jsonl")
    events.write("admitted", group=b"\xab\xcd", own=True)
    events.write("taken", group=b"\xab\xcd", step=1)
    events.close()
    of_group = [event for event in read_events(tmp_path / "events.jsonl") if event["group"] == "abcd"]
    assert [event["event"] for event in of_group] == ["admitted", "taken"]
    assert read_events(tmp_path / "events.jsonl", name="taken")[0]["step"] == 1
    assert read_events(tmp_path / "missing.jsonl") == []


@pytest.mark.parametrize("max_bytes", [1000, 60], ids=["one file", "rotated"])
def test_an_event_after_close_is_written_and_leaves_no_open_file(tmp_path, max_bytes):
    with closing(EventLog(tmp_path / "events.jsonl", max_bytes=max_bytes)) as events:
        events.write("taken", step=1)
    events.write("taken", step=2)
    events.write("taken", step=3)
    assert read_events(tmp_path / "events.jsonl")[-1]["step"] == 3
    assert not [file.path for file in psutil.Process().open_files() if file.path.startswith(str(tmp_path))]


def test_a_json_log_line_has_null_for_nan_and_infinity():
    record = logging.LogRecord("ftis_node", logging.INFO, __file__, 1, "step %d", (3,), None)
    record.fields = {"loss": float("nan"), "by_sender": [{"kl": float("inf"), "groups": 2}], "step": 3}

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    document = json.loads(JsonFormatter().format(record), parse_constant=refuse)
    assert document["fields"] == {"loss": None, "by_sender": [{"kl": None, "groups": 2}], "step": 3}
    assert document["message"] == "step 3"


def test_an_incomplete_line_is_skipped(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1, "event": "a"}\n{"time": 2, "ev')
    assert [event["event"] for event in read_events(path)] == ["a"]
    path.rename(tmp_path / "events.jsonl.1")
    path.write_text('{"time": 3, "event": "b"}\n')
    assert [event["event"] for event in read_events(path)] == ["a", "b"]


def test_the_event_log_is_rotated_at_a_size(tmp_path):
    events = EventLog(tmp_path / "events.jsonl", max_bytes=1000, kept_files=2)
    for number in range(100):
        events.write("step", step=number)
    events.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    assert all(file.stat().st_size <= 1000 for file in files)
    assert read_events(tmp_path / "events.jsonl")[-1]["step"] == 99
    (tmp_path / "events.jsonl.10").write_text("")
    (tmp_path / "events.jsonl.bak").write_text("")
    names = [file.name.removeprefix("events.jsonl") for file in event_log_files(tmp_path / "events.jsonl")]
    assert names == [".10", ".2", ".1", ""], "oldest first"


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
    assert ([point.step for point in history.steps], history.damaged_lines) == ([1, 3], 4)


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
    assert (len(reader.history.events), reader.history.damaged_lines) == (5, 0)


def test_an_incomplete_line_is_read_after_its_end_is_written(path):
    path.write_bytes(b'{"time":1,"event":"step","st')
    reader = HistoryReader(path)
    assert reader.poll() is False
    with path.open("ab") as file:
        file.write(b'ep":1}\n')
    assert reader.poll() is True
    assert [point.step for point in reader.history.steps] == [1]
