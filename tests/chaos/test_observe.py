"""The invariants on a real node: nothing is wrong with it, killed and started again; what is made wrong is seen."""

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
from tests.chaos.invariants.checks import broken, check, snapshot
from tests.chaos.observing.observe import saved_steps
from tests.chaos.observing.processes import family_of, leftovers_of, strays_of
from tests.node.support import ANY_PORT, RunningNode, started, write_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.chaos.invariants.checks import Violation
    from tests.chaos.observing.observe import Observation

START_S = 240.0
ASIDE_S = 0.2  # given to what will not pass by itself


@dataclass(eq=False)
class OneNode:
    """A node by itself, as the swarm's nodes are watched."""

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
        """None between two learners."""
        return next((process.pid for process in family_of(self) if process.role == "learner worker"), None)

    def wait_for_steps(self, more: int) -> None:
        target = self.steps() + more
        self.process.wait_for(lambda: self.steps() >= target, timeout_s=START_S)


@dataclass
class Past:
    """A short life with two crashes: what was seen, and what was found wrong."""

    node: OneNode
    last: Observation
    found: dict[str, list[Violation]]


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory, tiny_models: Mapping[str, Path]) -> Iterator[Past]:
    """A node whose learner is killed, then its daemon; started again and stopped in order."""
    folder = tmp_path_factory.mktemp("watched")
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
        found["its learner was killed"] = check(before, seen, None)
        os.kill(node.pid, signal.SIGKILL)
        process.process.wait()
        before, seen = seen, snapshot(node)
        found["it was killed"] = check(before, seen, None)
    with started(folder / "node", *command) as node.process:
        node.wait_for_steps(2)
        before, seen = seen, snapshot(node)
        found["it was started again"] = check(before, seen, None)
        node.process.stop()
        before, seen = seen, snapshot(node)
        found["it was stopped"] = check(before, seen, None)
        yield Past(node, seen, found)


@pytest.mark.timeout(600)
def test_a_real_node_that_is_killed_and_started_again_breaks_nothing(past: Past) -> None:
    assert {when: list(map(str, violations)) for when, violations in past.found.items() if violations} == {}
    assert past.last.buffer is not None and past.last.buffer.rows
    assert past.last.newest_saved > 0


def _row(query: str) -> Callable[[Home], object]:
    def change(home: Home) -> object:
        connection = sqlite3.connect(home.replay)
        connection.execute(query)
        connection.commit()
        connection.close()
        return None

    return change


def _socket(home: Home) -> object:
    home.sockets.mkdir()
    return _socket_at(home.sockets / "dead.sock")


def _socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def _stray(home: Home) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()", "--home", str(home.root)], stdin=subprocess.PIPE)


def _line(line: str) -> Callable[[Home], object]:
    def change(home: Home) -> object:
        with home.events.open("a") as trail:
            return trail.write(line.format(last=saved_steps(home.root)[-1]) + "\n")

    return change


def _used_again(home: Home) -> object:
    first = next(line for line in home.events.read_text().splitlines() if '"taken"' in line)
    return _line('{{"time":1,"event":"taken","group":"GROUP","step":{last}9}}'.replace("GROUP", group_of(first)))(home)


def group_of(line: str) -> str:
    return str(json.loads(line)["group"])


def _other_step(home: Home) -> object:
    said = json.loads(home.status.read_text())
    said["learner"]["step"] += 1
    return home.status.write_text(json.dumps(said))


OWN = "(SELECT id FROM groups WHERE own = 1 AND reason = 'trained' ORDER BY arrival LIMIT 1)"
MADE_WRONG: dict[str, Callable[[Home], object]] = {
    "no group is lost": _row(f"DELETE FROM groups WHERE id = {OWN}"),
    "a group is in one state": _row(f"UPDATE groups SET state = 'ready' WHERE id = {OWN}"),
    "trail and buffer agree on what a step used": _row(f"UPDATE groups SET step = step + 1 WHERE id = {OWN}"),
    "no file is left": _socket,
    "the status is truthful": _other_step,
    "no process outlives its time": _stray,
    "no group is used twice": _used_again,
    "the trail can be read": _line("no event"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("invariant", MADE_WRONG)
def test_what_is_made_wrong_with_it_is_seen(past: Past, invariant: str, tmp_path: Path) -> None:
    assert invariant not in {wrong.invariant for wrong in broken(past.last)}
    made = MADE_WRONG[invariant](Home(past.node.home))
    try:
        now = snapshot(past.node, settle_s=ASIDE_S)
    finally:
        if isinstance(made, subprocess.Popen):
            made.communicate(b"\n")
    assert invariant in {violation.invariant for violation in check(past.last, now, None)}


@dataclass(eq=False)
class StandIn:
    """This very process in the place of a node that runs."""

    home: Path
    name: str = "stand-in"
    is_running: bool = True
    pid: int = field(default_factory=os.getpid)


def test_weights_on_their_way_are_no_leftover_but_those_of_two_versions_are(tmp_path: Path) -> None:
    node, partial = StandIn(tmp_path), tmp_path / "weights" / "followed" / "partial"
    partial.mkdir(parents=True)
    (partial / "ab.part").touch()
    assert leftovers_of(node) == {}
    (partial / "cd.part").touch()
    assert {Path(words).name for words in leftovers_of(node).values()} == {"ab.part", "cd.part"}


def test_a_socket_is_left_when_nobody_listens_and_a_process_when_it_is_under_no_daemon(tmp_path: Path) -> None:
    node, sockets = StandIn(tmp_path), Home(tmp_path).sockets
    sockets.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(sockets / "live.sock"))
        listener.listen()
        _socket_at(sockets / "dead.sock")
        assert [Path(words).name for words in leftovers_of(node).values()] == ["dead.sock"]
    child = _stray(Home(tmp_path))
    try:
        family = family_of(node)
        assert {os.getpid(), child.pid} <= {process.pid for process in family}
        assert strays_of(node, (), family) == {}, "it is under the daemon"
        mine = [process for process in family if process.pid == child.pid]
        assert [pid for pid, _ in strays_of(node, mine, ())] == [child.pid], "and here it is not"
    finally:
        child.communicate(b"\n")
    assert strays_of(node, mine, ()) == {}, "it has ended"
