"""Folders that are either complete or absent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from worker_support import PYTHON_PATH

from ftis_node.workers import durable
from ftis_node.workers.durable import complete_folder, is_complete, keep_newest, newest_complete, remove_leftovers


def write(parent: Path, name: str, text: str = "x") -> Path:
    with complete_folder(parent / name) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text(text)
    return parent / name


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def test_a_folder_appears_only_when_complete(tmp_path):
    with complete_folder(tmp_path / "deep" / "step-1") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "deep" / "step-1").exists()
        assert newest_complete(tmp_path / "deep", "step-") is None
    assert is_complete(tmp_path / "deep" / "step-1")
    assert names(tmp_path / "deep") == ["step-1"]


def test_a_failed_write_leaves_the_old_folder(tmp_path):
    write(tmp_path, "step-1", "old")
    with pytest.raises(OSError, match="no space"), complete_folder(tmp_path / "step-1") as folder:
        (folder / "half").write_text("x")
        raise OSError("no space left on device")
    assert (tmp_path / "step-1" / "inner" / "file").read_text() == "old"
    assert is_complete(tmp_path / "step-1")
    assert names(tmp_path) == ["step-1"]


def test_an_existing_folder_is_replaced(tmp_path):
    write(tmp_path, "step-1", "old")
    write(tmp_path, "step-1", "new")
    assert (tmp_path / "step-1" / "inner" / "file").read_text() == "new"
    assert names(tmp_path) == ["step-1"]


def test_all_files_are_synced_and_the_marker_follows_the_rename(tmp_path, monkeypatch):
    steps: list[str] = []
    sync, rename = os.fsync, Path.rename

    def record_sync(descriptor):
        steps.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name.partition('.incomplete')[0]}")
        sync(descriptor)

    def record_rename(self, target):
        steps.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    write(tmp_path, "step-1")
    parent = f"sync {tmp_path.name}"
    assert sorted(steps[:3]) == ["sync .step-1", "sync file", "sync inner"]
    assert steps[3:] == ["rename", parent, "sync COMPLETE", "sync step-1"]


def test_the_newest_complete_folder_is_chosen_by_number(tmp_path):
    for name in ("step-9", "step-10", "step-2", "other-99", "step-x"):
        write(tmp_path, name)
    (tmp_path / "step-11").mkdir()
    assert newest_complete(tmp_path, "step-") == tmp_path / "step-10"
    assert newest_complete(tmp_path / "missing", "step-") is None


def test_keep_newest_removes_older_complete_folders(tmp_path):
    for number in range(8, 12):
        write(tmp_path, f"step-{number}")
    (tmp_path / "step-12").mkdir()
    keep_newest(tmp_path, "step-", keep=2)
    assert names(tmp_path) == ["step-10", "step-11", "step-12"]


def test_an_interrupted_removal_leaves_no_complete_folder(tmp_path, monkeypatch):
    write(tmp_path, "step-1")
    write(tmp_path, "step-2")

    def interrupted(path):
        raise OSError("interrupted")

    monkeypatch.setattr(durable.shutil, "rmtree", interrupted)
    with pytest.raises(OSError, match="interrupted"):
        keep_newest(tmp_path, "step-", keep=1)
    assert (tmp_path / "step-1").exists()
    assert not is_complete(tmp_path / "step-1")


KILLED = """
import os, signal, sys
from pathlib import Path
from ftis_node.workers import durable

if sys.argv[2] == "before-marker":
    durable._write_marker = lambda target, sync: os.kill(os.getpid(), signal.SIGKILL)
with durable.complete_folder(Path(sys.argv[1]) / "step-2") as folder:
    (folder / "file").write_text("x")
    if sys.argv[2] == "while-writing":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("moment", ["while-writing", "before-marker"])
def test_a_kill_leaves_the_previous_folder_as_the_newest(tmp_path, moment):
    write(tmp_path, "step-1")
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), moment], env=environment, check=False)
    assert (killed.returncode, len(names(tmp_path))) == (-9, 2)
    assert newest_complete(tmp_path, "step-") == tmp_path / "step-1"
    remove_leftovers(tmp_path, "step-")
    assert names(tmp_path) == ["step-1"]
    write(tmp_path, "step-2")
    assert newest_complete(tmp_path, "step-") == tmp_path / "step-2"
