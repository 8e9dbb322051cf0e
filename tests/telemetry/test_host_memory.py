"""The free memory of the host within the limits of control groups, whose files are written here."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ftis_node.telemetry.host_memory import free_host_bytes

GIB = 1 << 30
FILES = {2: ("memory.max", "memory.current"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=200 * GIB))


def write_group(folder: Path, version: int, limit: object, used_gib: int = 0, files_gib: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(FILES[version], (limit, used_gib * GIB), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 1\nactive_file {files_gib * GIB}\ninactive_file 0\n")


def free_gib(tmp_path: Path, lines: str) -> float:
    (tmp_path / "own").write_text(lines)
    return free_host_bytes(groups=tmp_path / "groups", own=tmp_path / "own") / GIB


@pytest.mark.parametrize(("version", "lines", "top"), [(2, "0::/\n", ""), (1, "5:cpu:/\n4:memory:/\n0::/\n", "memory")])
def test_the_limit_of_a_container_counts_without_what_it_uses(tmp_path, version, lines, top):
    write_group(tmp_path / "groups" / top, version, 24 * GIB, used_gib=10, files_gib=6)
    assert free_gib(tmp_path, lines) == 20
    write_group(tmp_path / "groups" / top, version, 24 * GIB, used_gib=25)
    assert free_gib(tmp_path, lines) == 0
    write_group(tmp_path / "groups" / top, version, 9223372036854771712 if version == 1 else "max")
    assert free_gib(tmp_path, lines) == 200


def test_the_smallest_limit_of_the_groups_above_counts(tmp_path):
    write_group(tmp_path / "groups" / "user.slice", 2, 30 * GIB, used_gib=12)
    write_group(tmp_path / "groups" / "user.slice" / "node.service", 2, 24 * GIB, used_gib=2)
    write_group(tmp_path / "groups" / "other.slice", 2, GIB)
    assert free_gib(tmp_path, "0::/user.slice/node.service\n") == 18


def test_a_group_of_the_host_that_a_container_does_not_see_is_skipped(tmp_path):
    write_group(tmp_path / "groups" / "memory", 1, 24 * GIB)
    assert free_gib(tmp_path, "4:memory:/docker/0123\n") == 24
    assert free_gib(tmp_path, "0::/../..\n") == 200


def test_a_system_without_groups_has_the_memory_of_its_host(tmp_path):
    assert free_host_bytes(groups=tmp_path, own=tmp_path / "none") == 200 * GIB
