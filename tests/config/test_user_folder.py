"""A user without a home folder, as in a container whose user id has no name: one line, and everything in the home."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from ftis_node.cli.app import run
from ftis_node.config.home import Home, give_user_folder
from ftis_node.node.storage.disk_space import measure_usage

NAMES = ("USER", "LOGNAME", "LNAME", "USERNAME", "HF_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A user without HOME and without an entry in the list of users."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setenv("HOME", "")  # so that its value is restored, whatever a test sets
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delenv("HOME")
    return monkeypatch


@pytest.mark.parametrize("command", [["status"], ["doctor"], ["join", "--model", "m"], ["export", "--out", "o"]])
def test_a_command_without_a_home_says_what_to_give(
    nobody: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert run(command) == 2
    assert capsys.readouterr().err == "ftis-node: this user has no home folder: give --home, or set HOME\n"


def test_libraries_write_into_the_given_home(nobody: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(["status", "--home", str(tmp_path / "home")]) == 2  # no node has run there
    assert os.environ["HOME"] == str(tmp_path / "home" / "user")
    assert os.path.expanduser("~/.cache") == str(tmp_path / "home" / "user" / ".cache")
    assert os.environ["USER"] == f"uid-{os.getuid()}"
    assert not (tmp_path / "home").exists(), "a command that only reads makes no home"


def test_a_home_folder_that_can_be_written_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    give_user_folder(tmp_path / "home" / "user")
    assert os.environ["HOME"] == str(tmp_path)


def test_a_hub_cache_in_a_closed_home_folder_stays_in_use(nobody: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = tmp_path / ".cache" / "huggingface"
    cache.mkdir(parents=True)
    nobody.setenv("HOME", str(tmp_path))
    nobody.setattr(os, "access", lambda path, mode: False)
    give_user_folder(tmp_path / "home" / "user")
    assert (os.environ["HF_HOME"], os.environ["HOME"]) == (str(cache), str(tmp_path / "home" / "user"))


def test_their_files_do_not_count_as_the_nodes(tmp_path: Path) -> None:
    home = Home(tmp_path)
    (home.user / ".cache").mkdir(parents=True)
    (home.user / ".cache" / "model.safetensors").write_bytes(bytes(1000))
    home.settings.write_bytes(bytes(10))
    assert measure_usage(home, keep_checkpoints=1).used_bytes == 10
