"""A home that cannot be used is refused in one sentence before anything is written."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ftis_node.config.home import Home, network_filesystem
from ftis_node.errors import ConfigError, MachineError


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
