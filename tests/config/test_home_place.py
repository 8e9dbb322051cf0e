"""Homes: one that cannot be used, a user without a home folder, and the options that a home keeps of its last start."""

import json
import os
import pwd
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ftis_node.cli.app import run
from ftis_node.config.home import Home, give_user_folder, network_filesystem
from ftis_node.config.home_files import start_command
from ftis_node.errors import ConfigError, MachineError
from ftis_node.node.storage.disk_space import measure_usage


@pytest.fixture
def mounts(monkeypatch, tmp_path):
    """Mount points of several types; no such file system can be mounted in a test."""
    kinds = {"/": "ext4", str(tmp_path / "share"): "nfs4", str(tmp_path / "share/local"): "ext4", "/mnt/c": "9p"}
    partitions = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in kinds.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: partitions)
    (tmp_path / "share/local").mkdir(parents=True)
    return tmp_path


def test_the_innermost_mount_decides(mounts):
    assert network_filesystem(mounts) is None
    assert network_filesystem(mounts / "share") == "nfs4"
    assert network_filesystem(mounts / "share/other/home") == "nfs4"
    assert network_filesystem(mounts / "share/local/home") is None
    assert network_filesystem(Path("/mnt/c/Users/me/home")) == "9p"


def test_a_home_on_a_network_file_system_is_refused(mounts):
    home = Home(mounts / "share/home")
    with pytest.raises(MachineError, match=r"is on a network file system \(nfs4\): give a local folder"), home.owned():
        raise AssertionError
    assert not home.lock.exists()
    with Home(mounts / "share/local/home").owned():
        pass


def test_a_name_that_no_file_system_takes_is_refused(tmp_path):
    assert Home(tmp_path / ("é" * 127)).root.name
    with pytest.raises(ConfigError, match="a name of 256 bytes, at most 255"):
        Home(tmp_path / ("é" * 128))


NAMES = ("USER", "LOGNAME", "LNAME", "USERNAME", "HF_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")


@pytest.fixture
def nobody(monkeypatch):
    """A user without HOME and without an entry in the list of users."""

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setenv("HOME", "")  # so that its value is restored, whatever a test sets
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delenv("HOME")
    return monkeypatch


@pytest.mark.parametrize("command", [["status"], ["doctor"], ["join", "--model", "m"], ["export", "--out", "o"]])
def test_a_command_without_a_home_says_what_to_give(nobody, capsys, command):
    assert run(command) == 2
    assert capsys.readouterr().err == "ftis-node: this user has no home folder: give --home, or set HOME\n"


def test_libraries_write_into_the_given_home(nobody, tmp_path):
    assert run(["status", "--home", str(tmp_path / "home")]) == 2  # no node has run there
    assert os.environ["HOME"] == str(tmp_path / "home" / "user")
    assert os.path.expanduser("~/.cache") == str(tmp_path / "home" / "user" / ".cache")
    assert os.environ["USER"] == f"uid-{os.getuid()}"
    assert not (tmp_path / "home").exists(), "a command that only reads makes no home"


def test_a_home_folder_that_can_be_written_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    give_user_folder(tmp_path / "home" / "user")
    assert os.environ["HOME"] == str(tmp_path)


def test_a_hub_cache_in_a_closed_home_folder_stays_in_use(nobody, tmp_path):
    cache = tmp_path / ".cache" / "huggingface"
    cache.mkdir(parents=True)
    nobody.setenv("HOME", str(tmp_path))
    nobody.setattr(os, "access", lambda path, mode: False)
    give_user_folder(tmp_path / "home" / "user")
    assert (os.environ["HF_HOME"], os.environ["HOME"]) == (str(cache), str(tmp_path / "home" / "user"))


def test_their_files_do_not_count_as_the_nodes(tmp_path):
    home = Home(tmp_path)
    (home.user / ".cache").mkdir(parents=True)
    (home.user / ".cache" / "model.safetensors").write_bytes(bytes(1000))
    home.settings.write_bytes(bytes(10))
    assert measure_usage(home).used_bytes == 10


def test_the_node_of_a_home_that_is_mounted_read_only_is_found(tmp_path):
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("the system does not allow `unshare -rm` (user namespaces)")
    home = tmp_path / "home"
    ask = f"from pathlib import Path; from ftis_node.config.home import Home; print(Home(Path({str(home)!r})).holder())"
    script = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && exec "$2" -c "$3"'
    with Home(home).owned():
        command = ["unshare", "-rm", "bash", "-c", script, "bash", str(home), sys.executable, ask]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == f"{os.getpid()}\n", done.stderr


def test_a_home_of_another_user_and_a_file_are_refused_in_one_line(tmp_path, monkeypatch, capsys):
    (file := tmp_path / "file").touch()
    assert run(["status", "--home", str(file)]) == 2
    assert capsys.readouterr().err == f"ftis-node: no node has run in {file}: give its home with --home\n"

    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("ftis_node.config.home.open_to_write", refuse)
    for command in (["status"], ["peers"], ["stop"], ["pause"]):
        assert run([*command, "--home", str(tmp_path)]) == 2
        line = f"ftis-node: cannot use {tmp_path} as home: Permission denied; give another with --home\n"
        assert capsys.readouterr().err == line


PEER = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
LISTEN = "/ip4/0.0.0.0/tcp/4001"


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "a home")


@pytest.fixture
def join(home, monkeypatch, capsys):
    """Start a node whose settings are kept as by a real start, and return them."""

    def keep(settings, *_, **__):
        home.root.mkdir(exist_ok=True)
        home.settings.write_text(settings.model_dump_json())

    def start(*options):
        assert run(["join", "--home", str(home.root), *options]) == 0, capsys.readouterr().err
        return json.loads(home.settings.read_text())

    monkeypatch.setattr("ftis_node.node.startup.run.run_until_stopped", keep)
    return start


GENERATOR = ("--model", "org/name", "--listen", LISTEN, "--name", "anna", "--role", "generator", "--follow", PEER)


def test_join_alone_and_the_printed_command_take_the_kept_options(join, home, monkeypatch):
    monkeypatch.setenv("FTIS_ROLES__WEIGHTS_DELAY", "fixed:60")
    first = join(*GENERATOR)
    monkeypatch.delenv("FTIS_ROLES__WEIGHTS_DELAY")
    assert (first["listen"], first["name"], first["role"]) == ([LISTEN], "anna", "generator")
    assert first["roles"]["follow"] == PEER and first["roles"]["weights_delay"] == "fixed:60"
    assert join() == first
    command = shlex.split(start_command(home))
    assert (command, join(*command[4:])) == (["ftis-node", "join", "--home", str(home.root)], first)


def test_an_option_replaces_what_is_kept(join, home, monkeypatch):
    join(*GENERATOR)
    other = PEER[:-1] + "B"
    changed = join("--listen", "/ip4/0.0.0.0/tcp/0", "--name", "", "--follow", other)
    assert (changed["listen"], changed["name"]) == (["/ip4/0.0.0.0/tcp/0"], "")
    assert changed["roles"]["follow"] == other
    full = join("--role", "full")
    assert (full["role"], full["roles"]["follow"]) == ("full", ""), "the learner to follow belongs to the former role"
    join(*GENERATOR)
    monkeypatch.setenv("FTIS_ROLE", "learner")
    assert join()["role"] == "learner"
    monkeypatch.delenv("FTIS_ROLE")
    home.node_toml.write_text('role = "full"\nname = "bob"\n')
    assert (join()["role"], join()["name"]) == ("full", "bob")
