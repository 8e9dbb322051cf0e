"""Short fault injections: a real swarm, some faults by a fixed seed, and no violation. `make chaos` runs longer.

Afterwards errors are made up in the home of a node, which the invariants must find.
"""

import json
import math
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from ftis_node.config.home import Home
from tests.chaos.__main__ import ONE_THREAD, parse, run
from tests.chaos.faults import catalog as faults
from tests.chaos.faults import power
from tests.chaos.invariants.checks import check, snapshot
from tests.chaos.runner import Runner
from tests.chaos.swarm import Swarm

OWN = "(SELECT id FROM groups WHERE own = 1 AND reason = 'trained' ORDER BY arrival LIMIT 1)"
SEED, SEED_OF_POWER = 4, 3
SETTLE_S = 0.2  # the made-up errors do not pass by themselves
FAULTS = (  # above all those that no other test shows
    *("kill-learner", "kill-network", "kill-bootstrap", "stop-network", "isolate", "false-claims"),
    *("clock-minutes-ahead", "database-corrupted", "checkpoint-truncated", "power-cut-at-commit"),
)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)


def delete_group(home):
    with closing(sqlite3.connect(home.replay)) as connection, connection:
        connection.execute(f"DELETE FROM groups WHERE id = {OWN}")


def append_garbage(home):
    with home.events.open("a") as events:
        events.write("no event\n")


def leave_socket(home):
    home.sockets.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home.sockets / "dead.sock"))


def start_orphan(home):
    return subprocess.Popen([sys.executable, "-c", "input()", "--home", str(home.root)], stdin=subprocess.PIPE)


def change_step(home):
    document = json.loads(home.status.read_text())
    document["learner"]["step"] += 1
    home.status.write_text(json.dumps(document))


ERRORS = {  # one in each source of an observation
    "no group is lost": delete_group, "the event log is readable": append_garbage,
    "no leftover file": leave_socket, "no orphan process": start_orphan, "the status is correct": change_step,
}  # fmt: skip


def violations_of(node, error):
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
def test_a_swarm_recovers_from_one_fault_of_each_kind(tmp_path, tiny_models):
    known = faults.chosen(FAULTS)
    assert {fault.kind for fault in known.values()} == set(faults.KINDS)
    with Swarm(tmp_path, tiny_models).running() as swarm:
        runner = Runner(swarm, known)
        planned = faults.first_by_node(len(known), faults.fitting(known, swarm), seed=SEED)
        outcomes = list(runner.run_all(planned, stop_after_s=math.inf))
        at_end = runner.end()
        found = {invariant: violations_of(swarm.node("a"), error) for invariant, error in ERRORS.items()}
    assert len(outcomes) == len(known)
    assert not any(outcome.violations for outcome in outcomes) and not at_end, "\n".join(map(str, [*outcomes, *at_end]))
    assert {name: names for name, names in found.items() if name not in names} == {}, "made-up errors are found"


@pytest.mark.timeout(900)
def test_a_node_loses_nothing_acknowledged_in_power_cuts(tmp_path, capsys):
    arguments = parse(f"--kinds power --seed {SEED_OF_POWER} --nodes 2 --faults {len(power.FAULTS)}".split())
    num_violations = run(arguments, tmp_path)
    lines = capsys.readouterr().out
    assert num_violations == 0, lines
    for fault in power.FAULTS:
        assert f" {fault.name} on " in lines
