"""A short fault injection: a real swarm, some faults by a fixed seed, and no violation. `make chaos` runs longer.

Afterwards errors are made up in the home of a node, which the invariants must find.
"""

from __future__ import annotations

import json
import math
import sqlite3
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ftis_node.config.home import Home
from tests.chaos import report, schedule
from tests.chaos.__main__ import ONE_THREAD
from tests.chaos.faults import catalog as faults
from tests.chaos.invariants.checks import check, snapshot
from tests.chaos.observation.evidence import Evidence
from tests.chaos.observation.watch import saved_steps
from tests.chaos.runner import Outcome, Runner
from tests.chaos.swarm import Swarm, SwarmNode
from tests.chaos.test_observation import make_dead_socket, start_orphan


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
    return make_dead_socket(home.sockets / "dead.sock")


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
    "no orphan process": start_orphan,
    "no group is used twice": _use_again,
    "the event log is readable": _append("no event"),
}


SEED = 4
SETTLE_S = 0.2  # the made-up errors do not pass by themselves
FAULTS = (  # above all those that no other test shows
    *("kill-learner", "kill-network", "kill-bootstrap", "stop-network", "isolate", "false-claims"),
    *("clock-minutes-ahead", "database-corrupted", "checkpoint-truncated"),
)


def violations_of(node: SwarmNode, error: Callable[[Home], object]) -> set[str]:
    """Make an error in the home of a stopped node, and return the names of the invariants that it newly violates."""
    before = snapshot(node, settle_s=0.0)
    made = error(Home(node.home))
    try:
        after = snapshot(node, settle_s=SETTLE_S)
    finally:
        if isinstance(made, subprocess.Popen):
            made.communicate(b"\n")
    return {violation.invariant for violation in check(before, after, None)}


@pytest.mark.timeout(3000)
def test_a_swarm_recovers_from_one_fault_of_each_kind(
    tmp_path: Path, tiny_models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    known, lines, outcomes, started_at = faults.chosen(FAULTS), list[str](), list[Outcome](), time.monotonic()
    assert {fault.kind for fault in known.values()} == set(faults.KINDS)
    with Swarm.running(tmp_path, tiny_models) as swarm:
        runner = Runner(swarm, known, Evidence(tmp_path))
        planned = schedule.first(len(known), faults.fitting(known, swarm), seed=SEED)
        for outcome in runner.run_all(schedule.by_node(planned), stop_after_s=math.inf):
            outcomes.append(outcome)
            lines += report.lines_of(outcome, at_s=time.monotonic() - started_at)
        at_end = runner.end()
        found = {invariant: violations_of(swarm.node("a"), error) for invariant, error in ERRORS.items()}
    printed = "\n".join([*lines, *map(str, at_end), f"reports: {tmp_path / 'violations'}"])
    assert report.last_line(outcomes, at_end) == f"{len(known)} faults, 0 violations", printed
    assert {name: names for name, names in found.items() if name not in names} == {}, "made-up errors are found"
