"""A short fault injection: a real swarm, some faults by a fixed seed, and no violation. `make chaos` runs longer.

Afterwards errors are made up in the home of a node, which the invariants must find.
"""

import json
import math
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing

import pytest

from ftis_node.config.home import Home
from tests.chaos.__main__ import ONE_THREAD
from tests.chaos.evidence import Evidence
from tests.chaos.faults import catalog as faults
from tests.chaos.invariants.checks import check, snapshot
from tests.chaos.observation.watch import saved_steps
from tests.chaos.runner import Runner
from tests.chaos.schedule import first_by_node
from tests.chaos.swarm import Swarm, SwarmNode

OWN = "(SELECT id FROM groups WHERE own = 1 AND reason = 'trained' ORDER BY arrival LIMIT 1)"
SEED = 4
SETTLE_S = 0.2  # the made-up errors do not pass by themselves
FAULTS = (  # above all those that no other test shows
    *("kill-learner", "kill-network", "kill-bootstrap", "stop-network", "isolate", "false-claims"),
    *("clock-minutes-ahead", "database-corrupted", "checkpoint-truncated", "power-cut-at-commit"),
)


def _execute(query: str) -> Callable[[Home], None]:
    def change(home: Home) -> None:
        with closing(sqlite3.connect(home.replay)) as connection, connection:
            connection.execute(query)

    return change


def _append(home: Home, line: str) -> None:
    with home.events.open("a") as events:
        events.write(line + "\n")


def _leave_socket(home: Home) -> None:
    home.sockets.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home.sockets / "dead.sock"))


def _start_orphan(home: Home) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()", "--home", str(home.root)], stdin=subprocess.PIPE)


def _use_again(home: Home) -> None:
    first = next(line for line in home.events.read_text().splitlines() if '"taken"' in line)
    later_step = int(f"{saved_steps(home.root)[-1]}9")
    _append(home, json.dumps({"time": 1, "event": "taken", "group": json.loads(first)["group"], "step": later_step}))


def _change_step(home: Home) -> None:
    document = json.loads(home.status.read_text())
    document["learner"]["step"] += 1
    home.status.write_text(json.dumps(document))


ERRORS: dict[str, Callable[[Home], subprocess.Popen[bytes] | None]] = {
    "no group is lost": _execute(f"DELETE FROM groups WHERE id = {OWN}"),
    "a group is in one state": _execute(f"UPDATE groups SET state = 'ready' WHERE id = {OWN}"),
    "event log and buffer agree on the groups of a step": _execute(
        f"UPDATE groups SET step = step + 1 WHERE id = {OWN}"
    ),
    "no leftover file": _leave_socket,
    "the status is correct": _change_step,
    "no orphan process": _start_orphan,
    "no group is used twice": _use_again,
    "the event log is readable": lambda home: _append(home, "no event"),
}


def violations_of(node: SwarmNode, error: Callable[[Home], subprocess.Popen[bytes] | None]) -> set[str]:
    """Make an error in the home of a stopped node, and return the names of the invariants that it newly violates."""
    before = snapshot(node, settle_s=0.0)
    orphan = error(Home(node.home))
    try:
        after = snapshot(node, settle_s=SETTLE_S)
    finally:
        if orphan is not None:
            orphan.communicate(b"\n")
    return {violation.invariant for violation in check(before, after, "")}


@pytest.mark.timeout(3000)
def test_a_swarm_recovers_from_one_fault_of_each_kind(tmp_path, tiny_models, monkeypatch):
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    known = faults.chosen(FAULTS)
    assert {fault.kind for fault in known.values()} == set(faults.KINDS)
    with Swarm.running(tmp_path, tiny_models) as swarm:
        runner = Runner(swarm, known, Evidence(tmp_path))
        planned = first_by_node(len(known), faults.fitting(known, swarm), seed=SEED)
        outcomes = list(runner.run_all(planned, stop_after_s=math.inf))
        at_end = runner.end()
        found = {invariant: violations_of(swarm.node("a"), error) for invariant, error in ERRORS.items()}
    assert len(outcomes) == len(known)
    assert not any(outcome.violations for outcome in outcomes) and not at_end, "\n".join(map(str, [*outcomes, *at_end]))
    assert {name: names for name, names in found.items() if name not in names} == {}, "made-up errors are found"
