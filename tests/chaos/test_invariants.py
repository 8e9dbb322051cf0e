"""Each invariant finds a made-up violation, a correct history with a crash has none; the schedule; the README."""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.faults import catalog as faults
from tests.chaos.invariants import checks as invariants
from tests.chaos.invariants.checks import OF_A_STATE, check, findings
from tests.chaos.invariants.groups import lost_acknowledged, shared_numbers
from tests.chaos.invariants.status import DAY_S
from tests.chaos.observation.buffer import Buffer, Row
from tests.chaos.observation.event_log import Event
from tests.chaos.observation.processes import Process
from tests.chaos.observation.watch import Observation

US, PEER = "12D3us", "12D3peer"
MIB = 1 << 20
Change = Callable[[Observation], Observation]


def event(name: str, **fields: Any) -> Event:
    return Event(name, fields=fields)


def admitted(number: int, *, sender: str = US, version: int = 0, group: str = "") -> Event:
    name = group or f"{sender}-{number}"
    return event("admitted", group=name, own=sender == US, sender=sender, number=number, policy_version=version)


def events_of(*steps: int) -> list[Event]:
    """Return the events of a start and of steps that each take an own and a foreign group with their number."""
    events = [event("start", peer=US), event("served", version=steps[0] - 1)]
    for step in steps:
        events += [admitted(step, version=step - 1), admitted(step, sender=PEER)]
        events += [event("taken", group=f"{sender}-{step}", step=step) for sender in (US, PEER)]
        events += [event("served", version=step), event("step", step=step, policy_version=step)]
    return events


def row(sender: str, number: int, **changes: Any) -> Row:
    """Return the row of a group that the step with its number trained on."""
    trained = Row(f"{sender}-{number}", sender == US, sender, number, "released", "trained", number)
    return replace(trained, **changes)


def status(*, step: int = 3, restarts: int = 0, **node: Any) -> dict[str, Any]:
    worker = {"state": "ready", "restarts": restarts}
    return {
        "node": {"state": "running", "peer_id": US, **node},
        "generation": worker,
        "learner": worker | {"step": step},
    }


def processes(**changes: Any) -> tuple[Process, ...]:
    roles = ("daemon", "generation worker", "learner worker", "p2pd")
    return tuple(
        Process(role, 100 + position, 5, rss_bytes=400 * MIB, num_fds=20, num_threads=8, **changes)
        for position, role in enumerate(roles)
    )


def correct() -> Observation:
    """Return a node with three steps and a waiting group. A crash repeated the third step, which counts once."""
    events = [*events_of(1, 2, 3)[:-1], event("start", peer=US), event("served", version=2)]
    events += [event("taken", group=f"{sender}-3", step=3) for sender in (US, PEER)]
    events += [event("served", version=3), event("step", step=3, policy_version=3), admitted(4, version=3)]
    rows = [row(sender, number) for number in (2, 3) for sender in (US, PEER)]
    waiting = row(US, 4, state="ready", reason=None, step=None)
    return Observation(
        "a",
        events=tuple(events),
        num_settled=len(events),
        buffer=Buffer((*rows, waiting), pruned={US: ((1, 1),), PEER: ((1, 1),)}, last_number=4),
        saved=(0, 2, 3),
        processes=processes(),
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


def with_status(document: dict[str, Any]) -> Change:
    return lambda seen: replace(seen, status=document)


def stopped(seen: Observation) -> Observation:
    """Stop the node in order, with a correct status."""
    document = status(state="stopped")
    document |= {"generation": {"state": "stopped"}, "learner": {"state": "stopped", "step": 3}}
    ended = with_events(event("stop"))(seen)
    return replace(ended, is_running=False, processes=(), status=document)


def without(number: int) -> Change:
    """Remove the own group with this number from the buffer."""

    def change(seen: Observation) -> Observation:
        assert seen.buffer is not None
        rows = tuple(one for one in seen.buffer.rows if (one.sender, one.number) != (US, number))
        return with_buffer(rows=rows)(seen)

    return change


def step_events(step: int, group: int, version: int) -> tuple[Event, Event]:
    """Return the events of a step that takes the own group with this number."""
    return event("taken", group=f"{US}-{group}", step=step), event("step", step=step, policy_version=version)


VIOLATIONS: list[tuple[str, Change]] = [
    ("no group is lost", with_buffer(pruned={US: ((1, 1),)})),
    ("no own number is missing", with_buffer(last_number=6)),
    ("no own number is missing", without(3)),
    ("a group is in one state", with_row(4, step=4)),
    ("a group is in one state", with_row(4, state="released")),
    ("the buffer is intact", with_buffer(integrity_error="page 3 is never used")),
    ("no group is used twice", with_events(event("taken", group=f"{US}-3", step=4))),
    ("event log and buffer agree on the groups of a step", with_row(0, step=1)),
    ("event log and buffer agree on the groups of a step", with_row(0, state="ready", reason=None, step=None)),
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
    (
        "no zombie process",
        lambda seen: replace(seen, processes=(*seen.processes, Process("other", 7, 1, is_zombie=True))),
    ),
    ("one process per role", lambda seen: replace(seen, processes=(*seen.processes, Process("p2pd", 7, 1)))),
    ("no leftover file", lambda seen: replace(seen, leftovers={("x.tmp", 7): "x.tmp"})),
    ("no leftover file", lambda seen: replace(stopped(seen), leftovers={("run", 7): "run"})),
    ("the status is correct", with_status(status(state="stopped"))),
    ("the status is correct", with_status(status(step=2))),
    ("the status is correct", with_status(status(peer_id=PEER))),
    ("the status is correct", with_status({"error": "does not answer"})),
    ("the status is correct", lambda seen: replace(seen, processes=seen.processes[:2])),
    ("the status is correct", lambda seen: replace(stopped(seen), status=status())),
    (
        "the status is correct",
        lambda seen: with_status(seen.status | {"learner": {"state": "stopped", "step": 2}})(stopped(seen)),
    ),
]


def test_each_violation_of_a_state_is_found():
    for invariant, change in VIOLATIONS:
        found = check(correct(), change(correct()), "")
        assert invariant in {violation.invariant for violation in found}, invariant
        assert all(violation.figures and violation.node == "a" for violation in found)
    assert {name for name, _ in VIOLATIONS} == set(OF_A_STATE)


def test_a_crash_a_stop_and_a_logged_loss_are_no_violations():
    assert findings(correct()) == []
    assert findings(stopped(correct())) == []
    killed = replace(stopped(correct()), events=correct().events)
    assert findings(replace(killed, is_torn=True, leftovers={("run", 7): "run"})) == []
    earlier = with_events(event("step_lost", step=3), *step_events(2, 2, 2))(killed)
    assert "the status is correct" not in names(earlier), "the status is older than the crash of the learner"
    lost = with_buffer(rows=(), pruned={}, last_number=0)
    logged = lost(with_events(event("recovered", file="replay.sqlite"))(correct()))
    assert findings(logged) == [], "the node logged the loss of its buffer"
    reset = event("recovered", file="replay.sqlite")
    used_again = with_events(event("released", group=f"{US}-4"), reset, *step_events(4, 4, 4))(correct())
    assert "a released group is not used" not in names(used_again), "the buffer lost the release"
    later = with_events(event("start", peer=US), admitted(5, version=3))(logged)
    assert names(replace(later, floor_step=2)) == {"no group is lost"}, "later losses are violations"


def other_learner(seen: Observation) -> Observation:
    changed = (replace(one, pid=one.pid + 50) if one.role == "learner worker" else one for one in seen.processes)
    return replace(seen, processes=tuple(changed))


REPEATED = with_events(event("start", peer=US), event("taken", group=f"{US}-4", step=3))
RESTARTED = status() | {"learner": {"state": "ready", "restarts": 1, "step": 3}}
BANNED = replace(correct(), bans={PEER: time.time() + 10 * DAY_S})
CHANGES: list[tuple[str, Observation, Change, Change]] = [  # the second change is allowed
    (
        "no step before a checkpoint is repeated",
        correct(),
        REPEATED,
        lambda seen: replace(REPEATED(seen), saved=(0, 2), set_aside=frozenset({"damaged-step-00000003"})),
    ),
    (
        "restarts are counted",
        correct(),
        other_learner,
        lambda seen: with_status(RESTARTED)(other_learner(seen)),
    ),
    (
        "restarts are counted",
        correct(),
        other_learner,
        lambda seen: with_events(event("pause_ended", paused_s=9.0))(other_learner(seen)),
    ),
    (
        "bans are kept",
        BANNED,
        lambda seen: replace(seen, bans={}),
        lambda seen: with_events(event("recovered", file="peers.sqlite"))(replace(seen, bans={})),
    ),
    *(
        (
            invariants.GROWTH,
            correct(),
            lambda seen, more=more: replace(seen, processes=tuple(replace(one, **more) for one in seen.processes)),
            lambda seen: seen,
        )
        for more in ({"rss_bytes": 2000 * MIB}, {"num_fds": 200}, {"num_threads": 200})
    ),
]


def test_each_violation_of_a_change_is_found():
    for invariant, before, wrong, allowed in CHANGES:
        assert invariant in {violation.invariant for violation in check(before, wrong(before), "")}
        assert invariant not in {violation.invariant for violation in check(before, allowed(before), "")}
    assert {name for name, *_ in CHANGES} == set(invariants.OF_A_CHANGE)


def test_growth_over_a_run_and_violations_over_all_nodes_are_found():
    grown = replace(correct(), processes=tuple(replace(one, num_fds=200) for one in processes()), floor_step=9)
    assert len(invariants.growth_over([replace(correct(), floor_step=9), grown])) == 4, "one for each role"
    another = replace(correct(), events=(event("start", peer=PEER), admitted(2, group="another")))
    assert list(shared_numbers([correct(), another])) == [f"number 2 of {US} belongs to 2 groups"]
    receiver = with_events(event("confirmed", group=f"{US}-2", peer=PEER))(correct())
    held = replace(correct(), events=(event("start", peer=PEER),))
    assert list(lost_acknowledged([receiver, held])) == []
    (figures,) = lost_acknowledged([receiver, without(2)(held)])
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


def names(seen: Observation) -> set[str]:
    return {invariant for invariant, _ in findings(seen)}
