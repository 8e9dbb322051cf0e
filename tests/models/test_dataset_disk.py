"""A data set of the hub on the disk: what is announced before, the limit, and what is left of one that is too large."""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftis_node.errors import DiskFullError, NetworkError, TaskError
from ftis_node.tasks.dataset_disk import MAX_DISK_BYTES, DownloadNotice, begin_in, limit_for, run_watched, too_large
from ftis_node.tasks.dataset_rows import MAX_MEMORY_BYTES, RowSource, read_rows
from tests.hub_stand_in import TOKEN, Repository, StandIn, running_stand_in

SMALL = b"".join(json.dumps({"q": f"{i}+1=", "a": str(i + 1)}).encode() + b"\n" for i in range(10))
ROW = json.dumps({"q": "x" * 1000, "a": "1"}).encode() + b"\n"
BOMB = gzip.compress(ROW * 200_000)  # 200 MB
LIMIT = 30_000_000


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The stand-in, with an empty cache below `tmp_path`."""
    with running_stand_in() as hub:
        for name, value in {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        yield hub


def offer(hub: StandIn, **files: bytes) -> RowSource:
    """Make the files the data set `o/n`, and return its split."""
    named = {name.replace("_", "."): data for name, data in files.items()}
    hub.repositories["datasets/o/n"] = Repository(private=False, branches={"main": named})
    return RowSource(("q", "a"), hub="o/n", split="train")


def contents(folder: Path) -> list[str]:
    """Return the names of the files that are not empty, and of links."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or (path.is_file() and path.stat().st_size)]
    return sorted(path.name for path in paths if path.name != "CACHEDIR.TAG")


def test_one_line_says_before_a_download_what_comes_from_where(
    hub: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = offer(hub, train_jsonl=SMALL)
    assert read_rows(source)[:2] == [["0+1=", "1"], ["1+1=", "2"]]
    limit = "4.3 GB" if limit_for(tmp_path, MAX_DISK_BYTES) == MAX_DISK_BYTES else ""
    (line,) = caplog.messages
    assert line.startswith(f"o/n (train): downloading from {hub.url}: 1 file of 241 B; at most {limit}")
    assert caplog.records[0].levelno == logging.WARNING  # shown by every command
    assert read_rows(source)[0] == ["0+1=", "1"]
    assert len(caplog.messages) == 1, "a data set in the cache is announced again"
    assert not list((tmp_path / "hf" / "datasets").glob("ftis-node-*"))


def test_a_data_set_that_unpacks_to_more_than_the_limit_is_removed(hub: StandIn, tmp_path: Path) -> None:
    kept = tmp_path / "hf" / "hub" / "datasets--o--n" / "blobs" / "of-another-revision"
    kept.parent.mkdir(parents=True)
    kept.write_text("x")
    source = offer(hub, train_jsonl_gz=BOMB)
    assert len(BOMB) < LIMIT / 10
    with pytest.raises(TaskError) as refused:
        read_rows(source, max_disk_bytes=LIMIT)
    assert str(refused.value) == too_large("o/n (train)", LIMIT, "unpacked; its files are removed again")
    assert contents(tmp_path / "hf") == ["of-another-revision"]


def test_a_download_that_the_hub_calls_too_large_does_not_begin(hub: StandIn, tmp_path: Path) -> None:
    source = offer(hub, train_jsonl=ROW * 3000)
    with pytest.raises(
        TaskError, match=r"^o/n \(train\) takes more than 1.0 MB of disk \(its files on the hub have 3.1 MB\)"
    ):
        read_rows(source, max_disk_bytes=1_000_000)
    assert not [path for _, path, _, _ in hub.requests if path.endswith("train.jsonl")]


def test_a_card_above_the_limit_is_no_way_around_it(hub: StandIn, tmp_path: Path) -> None:
    """The library fetches the card before it knows the files."""
    source = offer(hub, train_jsonl=SMALL, README_md=b"x" * LIMIT)
    with pytest.raises(TaskError, match="takes more than"):
        read_rows(source, max_disk_bytes=LIMIT // 2)
    assert contents(tmp_path / "hf") == []


FULL_DISK = """
import errno
def load_dataset_builder(*_, **__):
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError as error:
        raise RuntimeError("An error occurred while generating the dataset") from error
"""


def test_a_full_disk_is_an_error_of_the_machine(hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "datasets.py").write_text(FULL_DISK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with pytest.raises(DiskFullError, match=r"^o/n \(train\): the disk is full: free space"):
        read_rows(offer(hub))


SHOWN_LIMIT = """
import resource
def load_dataset_builder(*_, **__):
    raise ValueError(resource.getrlimit(resource.RLIMIT_DATA))
"""


def test_the_process_that_reads_has_a_limit_of_memory(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "datasets.py").write_text(SHOWN_LIMIT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with pytest.raises(NetworkError, match=re.escape(f"ValueError: ({MAX_MEMORY_BYTES}, {MAX_MEMORY_BYTES})")):
        read_rows(offer(hub))


def test_a_data_set_takes_at_most_half_of_the_free_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    assert (limit_for(tmp_path, 400), limit_for(tmp_path, 600)) == (400, 500)
    assert too_large("s", 500, "why").startswith(
        "s takes more than 500 B of disk (why): free disk space, or give the col"
    )


def test_only_new_files_are_counted_and_removed(tmp_path: Path) -> None:
    scratch, folder = tmp_path / "scratch", tmp_path / "folder"
    for path in (scratch, folder / "old", folder / "new"):
        path.mkdir(parents=True)
    (folder / "old" / "file").write_bytes(b"x" * 8192)
    announcement = DownloadNotice((str(folder),), str(scratch), begin_in(scratch), 1)
    assert announcement.taken_bytes() == 0
    (folder / "new" / "file").write_bytes(b"x" * 8192)
    (folder / "new" / "link").symlink_to("file")
    assert announcement.taken_bytes() == 8192
    announcement.remove()
    assert [path.name for path in folder.rglob("*")] == ["old", "file"]


def test_the_scratch_folder_of_a_killed_child_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = (
        "import os; from ftis_node.tasks.dataset_disk import DownloadNotice; "
        f"DownloadNotice((), {str(scratch)!r}, 0, 1 << 30, text='begins').send(); os.kill(os.getpid(), 9)"
    )
    ended = run_watched([sys.executable, "-c", code])
    assert (ended.returncode, ended.stderr.strip(), ended.passed_bytes) == (-9, b"", None)
    assert not scratch.exists()
    assert caplog.messages == ["begins"]
