"""The invariants on a real node: kills and restarts violate none, and made-up errors are found."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ftis_node.config.home import Home
from tests.chaos.invariants.checks import check, findings, snapshot
from tests.chaos.observation.processes import family_of, leftovers_of, orphans_of
from tests.chaos.observation.watch import saved_steps
from tests.node.support import ANY_PORT, RunningNode, started, write_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.chaos.invariants.checks import Violation
    from tests.chaos.observation.watch import Observation

START_S = 240.0
SETTLE_S = 0.2  # the made-up errors do not pass by themselves


@dataclass(eq=False)
class OneNode:
    """A single node, with the interface that an observation needs."""

    home: Path
    process: RunningNode
    name: str = "alone"

    @property
    def is_running(self) -> bool:
        return self.process.process.poll() is None

    @property
    def pid(self) -> int:
        return self.process.process.pid

    def steps(self) -> int:
        return len(self.process.events("step"))

    def learner_pid(self) -> int | None:
        """Return the pid of the learner, or None while there is none."""
        return next((process.pid for process in family_of(self) if process.role == "learner worker"), None)

    def wait_for_steps(self, more: int) -> None:
        target = self.steps() + more
        self.process.wait_for(lambda: self.steps() >= target, timeout_s=START_S)


@dataclass
class Past:
    """A node after two crashes: its last observation, and the violations after each event."""

    node: OneNode
    last: Observation
    found: dict[str, list[Violation]]


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory, tiny_models: Mapping[str, Path]) -> Iterator[Past]:
    """Kill a node's learner, then its daemon; start the node again and stop it in order."""
    folder = tmp_path_factory.mktemp("observed")
    run = write_manifest(folder / "run.toml", foreign_wait_s=0.5)
    command = ("join", "--model", str(tiny_models["s"]), "--run", str(run), "--listen", ANY_PORT)
    found: dict[str, list[Violation]] = {}
    with started(folder / "node", *command) as process:
        node = OneNode(folder / "node", process)
        node.wait_for_steps(3)
        seen = snapshot(node)
        assert (learner := node.learner_pid()) is not None
        os.kill(learner, signal.SIGKILL)
        process.wait_for(lambda: node.learner_pid() not in (learner, None), timeout_s=START_S)
        node.wait_for_steps(2)
        before, seen = seen, snapshot(node)
        found["learner killed"] = check(before, seen, None)
        os.kill(node.pid, signal.SIGKILL)
        process.process.wait()
        before, seen = seen, snapshot(node)
        found["daemon killed"] = check(before, seen, None)
    with started(folder / "node", *command) as node.process:
        node.wait_for_steps(2)
        before, seen = seen, snapshot(node)
        found["restarted"] = check(before, seen, None)
        node.process.stop()
        before, seen = seen, snapshot(node)
        found["stopped"] = check(before, seen, None)
        yield Past(node, seen, found)


@pytest.mark.timeout(600)
def test_kills_and_restarts_of_a_real_node_violate_no_invariant(past: Past) -> None:
    assert {when: list(map(str, violations)) for when, violations in past.found.items() if violations} == {}
    assert past.last.buffer is not None and past.last.buffer.rows
    assert past.last.newest_saved > 0


def _execute(query: str) -> Callable[[Home], object]:
    def change(home: Home) -> object:
        connection = sqlite3.connect(home.replay)
        connection.execute(query)
        connection.commit()
        connection.close()
        return None

    return change


def _leave_socket(home: Home) -> object:
    home.sockets.mkdir()
    return _make_dead_socket(home.sockets / "dead.sock")


def _make_dead_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def _start_orphan(home: Home) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()", "--home", str(home.root)], stdin=subprocess.PIPE)


def _append(line: str) -> Callable[[Home], object]:
    def change(home: Home) -> object:
        with home.events.open("a") as events:
            return events.write(line + "\n")

    return change


def _use_again(home: Home) -> object:
    first = next(line for line in home.events.read_text().splitlines() if '"taken"' in line)
    later_step = int(f"{saved_steps(home.root)[-1]}9")
    taken = {"time": 1, "event": "taken", "group": json.loads(first)["group"], "step": later_step}
    return _append(json.dumps(taken))(home)


def _change_step(home: Home) -> object:
    document = json.loads(home.status.read_text())
    document["learner"]["step"] += 1
    return home.status.write_text(json.dumps(document))


OWN = "(SELECT id FROM groups WHERE own = 1 AND reason = 'trained' ORDER BY arrival LIMIT 1)"
ERRORS: dict[str, Callable[[Home], object]] = {
    "no group is lost": _execute(f"DELETE FROM groups WHERE id = {OWN}"),
    "a group is in one state": _execute(f"UPDATE groups SET state = 'ready' WHERE id = {OWN}"),
    "event log and buffer agree on the groups of a step": _execute(
        f"UPDATE groups SET step = step + 1 WHERE id = {OWN}"
    ),
    "no leftover file": _leave_socket,
    "the status is correct": _change_step,
    "no orphan process": _start_orphan,
    "no group is used twice": _use_again,
    "the event log is readable": _append("no event"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("invariant", ERRORS)
def test_a_made_up_error_is_found(past: Past, invariant: str) -> None:
    assert invariant not in {finding.invariant for finding in findings(past.last)}
    made = ERRORS[invariant](Home(past.node.home))
    try:
        now = snapshot(past.node, settle_s=SETTLE_S)
    finally:
        if isinstance(made, subprocess.Popen):
            made.communicate(b"\n")
    assert invariant in {violation.invariant for violation in check(past.last, now, None)}


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
        _make_dead_socket(sockets / "dead.sock")
        assert [Path(path).name for path in leftovers_of(node).values()] == ["dead.sock"]


def test_a_process_of_the_home_is_an_orphan_if_it_is_no_descendant_of_the_daemon(tmp_path: Path) -> None:
    node, child = ThisProcess(tmp_path), _start_orphan(Home(tmp_path))
    try:
        family = family_of(node)
        assert {os.getpid(), child.pid} <= {process.pid for process in family}
        assert orphans_of(node, (), family) == {}, "it is a descendant"
        former = [process for process in family if process.pid == child.pid]
        assert [pid for pid, _ in orphans_of(node, former, ())] == [child.pid], "it is no descendant"
    finally:
        child.communicate(b"\n")
    assert orphans_of(node, former, ()) == {}, "it has ended"
