"""Processes and files that count as left behind by a node, with the test process in place of its daemon."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ftis_node.config.home import Home
from tests.chaos.observation.processes import family_of, leftovers_of, orphans_of


def make_dead_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def start_orphan(home: Home) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()", "--home", str(home.root)], stdin=subprocess.PIPE)


@dataclass(eq=False)
class ThisProcess:
    """The test process in place of a node's daemon."""

    home: Path
    name: str = "this-process"
    is_running: bool = True
    pid: int = field(default_factory=os.getpid)


def test_partial_weights_of_one_version_are_no_leftover_but_of_two_versions_are(tmp_path: Path) -> None:
    node, partial = ThisProcess(tmp_path), tmp_path / "weights" / "followed" / "partial"
    partial.mkdir(parents=True)
    (partial / "ab.part").touch()
    assert leftovers_of(node) == {}
    (partial / "cd.part").touch()
    assert {Path(path).name for path in leftovers_of(node).values()} == {"ab.part", "cd.part"}


def test_a_socket_without_a_listener_is_a_leftover(tmp_path: Path) -> None:
    node, sockets = ThisProcess(tmp_path), Home(tmp_path).sockets
    sockets.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(sockets / "live.sock"))
        listener.listen()
        make_dead_socket(sockets / "dead.sock")
        assert [Path(path).name for path in leftovers_of(node).values()] == ["dead.sock"]


def test_a_process_of_the_home_is_an_orphan_if_it_is_no_descendant_of_the_daemon(tmp_path: Path) -> None:
    node, child = ThisProcess(tmp_path), start_orphan(Home(tmp_path))
    try:
        family = family_of(node)
        assert {os.getpid(), child.pid} <= {process.pid for process in family}
        assert orphans_of(node, (), family) == {}, "it is a descendant"
        former = [process for process in family if process.pid == child.pid]
        assert [pid for pid, _ in orphans_of(node, former, ())] == [child.pid], "it is no descendant"
    finally:
        child.communicate(b"\n")
    assert orphans_of(node, former, ()) == {}, "it has ended"
