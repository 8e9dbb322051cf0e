"""Each invariant finds a made-up violation, and a correct history with a crash has none; the schedule; the README."""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.faults import catalog as faults
from tests.chaos.invariants import checks as invariants
from tests.chaos.invariants.checks import check, findings
from tests.chaos.invariants.groups import lost_acknowledged, shared_numbers
from tests.chaos.invariants.nodes import DAY_S
from tests.chaos.observation.processes import Process
from tests.chaos.observation.records import Buffer, Event, Row
from tests.chaos.observation.watch import Observation

US, PEER = "12D3us", "12D3peer"
MIB = 1 << 20
ROLES = ("daemon", "generation worker", "learner worker", "p2pd")
Change = Callable[[Observation], Observation]


def event(name: str, **fields: Any) -> Event:
    return Event(name, fields=fields)


def admitted(number: int, *, sender: str = US, version: int = 0, group: str = "") -> Event:
    name = group or f"{sender}-{number}"
    return event("admitted", group=name, own=sender == US, sender=sender, number=number, policy_version=version)


def taken(step: int, *groups: str) -> list[Event]:
    return [event("taken", group=group, step=step) for group in groups]


def step_events(step: int, group: int, version: int) -> tuple[Event, Event]:
    """Return the events of a step that takes the own group with this number."""
    return event("taken", group=f"{US}-{group}", step=step), event("step", step=step, policy_version=version)


def row(sender: str, number: int, **changes: Any) -> Row:
    """Return the row of a group that the step with its number trained on."""
    return replace(Row(f"{sender}-{number}", sender == US, sender, number, "released", "trained", number), **changes)


def status(*, step: int = 3, restarts: int = 0, **node: Any) -> dict[str, Any]:
    worker = {"state": "ready", "restarts": restarts}
    node = {"state": "running", "peer_id": US, **node}
    return {"node": node, "generation": worker, "learner": worker | {"step": step}}


def correct() -> Observation:
    """Return a node with three steps and a waiting group. A crash repeated the third step, which counts once."""
    events = [event("start", peer=US), event("served", version=0)]
    for step in (1, 2, 3):
        events += [admitted(step, version=step - 1), admitted(step, sender=PEER), *taken(step, f"{US}-{step}")]
        events += [*taken(step, f"{PEER}-{step}"), event("served", version=step)]
        events += [event("step", step=step, policy_version=step)] if step < 3 else []
    events += [event("start", peer=US), event("served", version=2), *taken(3, f"{US}-3", f"{PEER}-3")]
    events += [event("served", version=3), event("step", step=3, policy_version=3), admitted(4, version=3)]
    rows = [row(sender, number) for number in (2, 3) for sender in (US, PEER)]
    waiting = row(US, 4, state="ready", reason=None, step=None)
    return Observation(
        "a",
        events=tuple(events),
        num_settled=len(events),
        buffer=Buffer((*rows, waiting), pruned={US: ((1, 1),), PEER: ((1, 1),)}, last_number=4),
        saved=(0, 2, 3),
        processes=tuple(
            Process(role, 100 + at, 5, rss_bytes=400 * MIB, num_fds=20, num_threads=8) for at, role in enumerate(ROLES)
        ),
        status=status(),
        floor_step=3,
    )


def with_events(*more: Event) -> Change:
    return lambda seen: replace(seen, events=(*seen.events, *more), num_settled=seen.num_settled + len(more))


def with_buffer(**changes: Any) -> Change:
    return lambda seen: replace(seen, buffer=replace(seen.buffer or Buffer(), **changes))


def with_row(position: int, **changes: Any) -> Change:
    def change(seen: Observation) -> Observation:
        rows = list(seen.buffer.rows if seen.buffer else ())
        rows[position] = replace(rows[position], **changes)
        return with_buffer(rows=tuple(rows))(seen)

    return change


def with_processes(*more: Process, **changes: Any) -> Change:
    return lambda seen: replace(seen, processes=(*(replace(one, **changes) for one in seen.processes), *more))


def without_group(number: int) -> Change:
    """Remove the own group with this number from the buffer."""
    rows = correct().buffer.rows  # type: ignore[union-attr]
    return with_buffer(rows=tuple(one for one in rows if (one.sender, one.number) != (US, number)))


def stopped(seen: Observation) -> Observation:
    """Stop the node in order, with a correct status."""
    worker = {"state": "stopped", "restarts": 0}
    document = status(state="stopped") | {"generation": worker, "learner": worker | {"step": 3}}
    return replace(with_events(event("stop"))(seen), is_running=False, processes=(), status=document)


def other_learner(seen: Observation) -> Observation:
    changed = (replace(one, pid=one.pid + 50) if one.role == "learner worker" else one for one in seen.processes)
    return replace(seen, processes=tuple(changed))


VIOLATIONS: list[tuple[str, Change]] = [
    ("no group is lost", with_buffer(pruned={US: ((1, 1),)})),
    ("no own number is missing", with_buffer(last_number=6)), ("no own number is missing", without_group(3)),
    ("a group is in one state", with_row(4, step=4)),
    ("the buffer is intact", with_buffer(integrity_error="page 3 is never used")),
    ("no group is used twice", with_events(*taken(4, f"{US}-3"))),
    ("event log and buffer agree on the groups of a step", with_row(0, step=1)),
    ("event log and buffer agree on the groups of a step", with_row(4, state="released", reason="trained", step=2)),
    ("no group is stuck in a step", with_row(0, state="taken", reason=None)),
    ("a group is admitted once", with_events(admitted(4, version=3))),
    ("a group is admitted once", with_events(admitted(3, sender=PEER, group="another"))),
    ("admitted groups are logged", with_buffer(rows=tuple(row(PEER, number) for number in range(10, 300)))),
    ("a released group is not used", with_events(event("released", group=f"{US}-4"), *step_events(4, 4, 4))),
    ("steps are in order", with_events(*step_events(4, 4, 4)[:1], event("step", step=3, policy_version=3))),
    ("no step is missing", with_events(*step_events(5, 4, 5))),
    ("served versions rise", with_events(event("served", version=3))),
    ("published versions rise", with_events(*step_events(4, 4, 2))),
    ("own groups claim existing versions", with_events(admitted(5, version=9))),
    ("the event log is readable", lambda seen: replace(seen, damaged=("{half",))),
    ("the event log is readable", lambda seen: replace(seen, is_torn=True)),
    ("the peer id does not change", with_events(event("start", peer="12D3other"))),
    ("no orphan process", lambda seen: replace(seen, orphans={(7, 1): "learner worker (pid 7)"})),
    ("no zombie process", with_processes(Process("other", 7, 1, is_zombie=True))),
    ("one process per role", with_processes(Process("p2pd", 7, 1))),
    ("no leftover file", lambda seen: replace(stopped(seen), leftovers={("run", 7): "run"})),
    ("the status is correct", lambda seen: replace(seen, status=status(step=2))),
    ("the status is correct", lambda seen: replace(seen, status=status(peer_id=PEER))),
    ("the status is correct", lambda seen: replace(seen, status={"error": "does not answer"})),
    ("the status is correct", lambda seen: replace(seen, processes=seen.processes[:2])),
    ("the status is correct", lambda seen: replace(stopped(seen), status=status())),
    ("no step before a checkpoint is repeated", with_events(event("start", peer=US), *taken(3, f"{US}-4"))),
    *((invariants.GROWTH, with_processes(**{more: 2000 * MIB})) for more in ("rss_bytes", "num_fds", "num_threads")),
    ("restarts are counted", other_learner), ("bans are kept", lambda seen: replace(seen, bans={})),
]  # fmt: skip
BEFORE = replace(correct(), bans={PEER: time.time() + 10 * DAY_S})


def test_each_violation_is_found_and_reported_once():
    for invariant, change in VIOLATIONS:
        after = change(BEFORE)
        found = check(BEFORE, after, "")
        assert invariant in {violation.invariant for violation in found}, invariant
        assert all(violation.figures and violation.node == "a" for violation in found)
        assert not {one.invariant for one in check(after, after, "")} & set(invariants.OF_A_STATE), "reported before"
    assert {name for name, _ in VIOLATIONS} == {*invariants.OF_A_STATE, *invariants.OF_A_CHANGE}


def test_a_crash_a_stop_and_what_the_node_logged_are_no_violations():
    lost = event("recovered", file="replay.sqlite")
    killed = replace(stopped(correct()), events=correct().events, is_torn=True, leftovers={("run", 7): "run"})
    logged = with_buffer(rows=(), pruned={}, last_number=0)(with_events(lost)(correct()))
    for seen in (correct(), stopped(correct()), killed, logged):
        assert findings(seen) == []
    used_again = with_events(event("released", group=f"{US}-4"), lost, *step_events(4, 4, 4))(correct())
    assert "a released group is not used" not in {name for name, _ in findings(used_again)}
    counted = replace(other_learner(BEFORE), status=status() | {"learner": status(restarts=1)["learner"]})
    paused = with_events(event("pause_ended", paused_s=9.0))(other_learner(BEFORE))
    assert check(BEFORE, counted, "") == check(BEFORE, paused, "") == []
    assert check(BEFORE, with_events(event("recovered", file="peers.sqlite"))(correct()), "") == []


def test_growth_over_a_run_and_violations_over_all_nodes_are_found():
    warm = replace(correct(), floor_step=9)
    assert len(invariants.growth_over([warm, with_processes(num_fds=200)(warm)])) == len(ROLES)
    another = replace(correct(), events=(event("start", peer=PEER), admitted(2, group="another")))
    assert list(shared_numbers([correct(), another])) == [f"number 2 of {US} belongs to 2 groups"]
    receiver = with_events(event("confirmed", group=f"{US}-2", peer=PEER))(correct())
    held = replace(correct(), events=(event("start", peer=PEER),))
    assert list(lost_acknowledged([receiver, held])) == []
    (figures,) = lost_acknowledged([receiver, without_group(2)(held)])
    assert figures == f"group {US}-2 (number 2) is lost, which node a had acknowledged"


def test_each_round_has_each_fault_once_and_consecutive_faults_affect_different_nodes():
    nodes = ("a", "b", "c")
    planned = list(islice(faults.rounds({"kill": nodes, "cut": nodes, "core": ("a",), "impossible": ()}, seed=3), 60))
    for start in range(0, 60, 3):
        assert sorted(one.fault for one in planned[start : start + 3]) == ["core", "cut", "kill"]
    repeated = [two for one, two in pairwise(planned) if one.node == two.node]
    assert all(one.fault == "core" for one in repeated), "no other node can have this fault"


def test_the_readme_has_the_tables_of_the_code():
    readme = (Path(__file__).parent / "README.md").read_text()
    assert faults.table() in readme and invariants.table() in readme, "python -m tests.chaos --table"
    with pytest.raises(ValueError, match="erathquake: no such fault"):
        faults.chosen(["erathquake"])
