"""The event log over rotations and incomplete lines, JSON log lines, and the fields of the status."""

import json
import logging
from contextlib import closing

import msgspec
import psutil
import pytest

from ftis_node.telemetry.events import EventLog, event_log_files, read_events
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
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl") if event["group"] == "abcd"] == [
        "admitted",
        "taken",
    ]
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
