"""A disk that gets full at the worst moment: files are whole, the old ones where the new ones found no room."""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
from typing import TYPE_CHECKING

import pytest

from ftis_node.config.disk_room import is_disk_full, reporting_full_disk
from ftis_node.config.home import Home
from ftis_node.errors import MachineError
from ftis_node.files import replace_file
from ftis_node.records.identity import Identity
from ftis_node.telemetry.events import EventLog, read_events

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more gets to the disk."""

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)


def test_a_file_is_as_it_was_where_the_new_one_finds_no_room(tmp_path: Path, full: None) -> None:
    path = tmp_path / "run.toml"
    path.write_text("old")
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_who_reads_a_file_that_is_replaced_reads_the_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("old")
    with path.open() as reader:
        replace_file(path, b"new")
        assert (reader.read(), path.read_text()) == ("old", "new")
    assert list(tmp_path.iterdir()) == [path]


def test_no_half_identity_is_left(tmp_path: Path, full: None) -> None:
    with pytest.raises(OSError, match="No space"):
        Identity.load_or_create(tmp_path / "identity.key")
    assert not list(tmp_path.iterdir())


def test_a_half_written_event_is_cut_off_and_the_next_has_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time":1,"event":"start"}\n{"time":2,"eve')
    trail = EventLog(path)
    trail.write("stop")
    trail.close()
    assert [event["event"] for event in read_events(path)] == ["start", "stop"]


def test_an_event_that_finds_no_room_is_an_error_and_not_a_traceback_among_log_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trail = EventLog(tmp_path / "events.jsonl")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            trail.write("start")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert is_disk_full(caught.value, tmp_path)
    assert capsys.readouterr().err == ""
    trail.close()


def test_what_is_told_of_it(tmp_path: Path) -> None:
    lines = (OSError(errno.EDQUOT, "quota"), sqlite3_error("database or disk is full", sqlite3.SQLITE_FULL))
    for error in lines:
        with pytest.raises(MachineError, match="the disk is full: .* free disk space"), reporting_full_disk(tmp_path):
            raise error
    with pytest.raises(sqlite3.OperationalError, match="locked"), reporting_full_disk(tmp_path):
        raise sqlite3_error("locked", sqlite3.SQLITE_BUSY)


def test_a_home_on_a_full_disk_is_the_machines_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(MachineError, match="the disk is full"), Home(tmp_path).owned():
        pytest.fail("it was taken")


def test_a_checkpoint_that_finds_no_room_is_the_systems_error(tmp_path: Path) -> None:
    import torch

    from ftis_node.workers.tensor_file import write_tensors

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_tensors(tmp_path / "weights.safetensors", {"weight": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert is_disk_full(caught.value, tmp_path)


def sqlite3_error(text: str, code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error
