"""A write that fails on a full disk leaves the old file complete, and the error names the full disk."""

import errno
import os
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ftis_node.config.home import Home
from ftis_node.errors import MachineError
from ftis_node.files import is_disk_full, replace_file, reporting_full_disk
from ftis_node.records.identity import Identity
from ftis_node.telemetry.events import EventLog, read_events


@pytest.fixture
def full(monkeypatch):
    """Make every `fsync` fail for lack of space."""

    def refuse(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)


@contextmanager
def limited_files(num_bytes: int) -> Iterator[None]:
    """Let writes beyond this size of a file fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_failed_replacement_leaves_the_old_file(tmp_path, full):
    path = tmp_path / "run.toml"
    path.write_text("old")
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_a_partial_last_event_is_truncated(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"time":1,"event":"start"}\n{"time":2,"eve')
    events = EventLog(path)
    events.write("stop")
    events.close()
    assert [event["event"] for event in read_events(path)] == ["start", "stop"]


def test_a_failed_write_of_the_identity_leaves_no_file(tmp_path, full):
    with pytest.raises(OSError, match="No space"):
        Identity.load_or_create(tmp_path / "identity.key")
    assert not list(tmp_path.iterdir())


def test_events_wait_for_space_and_are_written_in_order(tmp_path, caplog):
    """The disk has space for one line and a half."""
    path = tmp_path / "events.jsonl"
    events = EventLog(path)
    events.write("start")
    with limited_files(path.stat().st_size + 20):
        for number in range(100):
            events.write("waits", number=number)
    assert not path.read_bytes().endswith(b"\n")
    events.write("stop")
    events.close()
    written = read_events(path)
    assert [event.get("number") for event in written] == [None, *range(100), None]
    assert [record.levelname for record in caplog.records] == ["WARNING"], "one line in a minute"


def test_events_beyond_the_memory_for_them_are_counted(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("ftis_node.telemetry.events.MAX_WAITING_BYTES", 1000)
    events = EventLog(tmp_path / "events.jsonl")
    with limited_files(0):
        for _ in range(100):
            events.write("waits", text="x" * 60)
        assert events.num_dropped > 80
        events.close()
    assert "the disk was full: the last 100 events are not in" in caplog.text


def test_errors_of_a_full_disk_become_a_machine_error_that_says_what_to_do(tmp_path):
    errors = (OSError(errno.EDQUOT, "quota"), sqlite3_error("database or disk is full", sqlite3.SQLITE_FULL))
    for error in errors:
        with pytest.raises(MachineError, match="the disk is full: .* free disk space"), reporting_full_disk(tmp_path):
            raise error
    with pytest.raises(sqlite3.OperationalError, match="locked"), reporting_full_disk(tmp_path):
        raise sqlite3_error("locked", sqlite3.SQLITE_BUSY)


def test_a_home_on_a_full_disk_raises_a_machine_error(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(MachineError, match="the disk is full"), Home(tmp_path).owned():
        pytest.fail("the home was locked")


def test_a_failed_write_of_tensors_raises_the_error_of_a_full_disk(tmp_path):
    import torch

    from ftis_node.workers.tensor_file import write_tensors

    with limited_files(1000), pytest.raises(OSError, match="File too large") as caught:
        write_tensors(tmp_path / "weights.safetensors", {"weight": torch.zeros(1000)})
    assert is_disk_full(caught.value, tmp_path)


def sqlite3_error(text: str, code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error
