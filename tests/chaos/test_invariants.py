"""Each invariant is shown a history that breaks it, and sees it; of a sound one with a crash in it, it says nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.chaos.invariants import checks as invariants
from tests.chaos.invariants.checks import AT_ONE_MOMENT, FROM_ONE_TO_ANOTHER, broken, check
from tests.chaos.invariants.groups import two_of_a_number
from tests.chaos.invariants.steps import versions_claimed
from tests.chaos.observing.buffer import Buffer, Row
from tests.chaos.observing.observe import Observation
from tests.chaos.observing.processes import Process
from tests.chaos.observing.trail import Event, EventLogMemory, counted

if TYPE_CHECKING:
    from collections.abc import Callable

NAMELESS = '{"time":8,"event":"taken","step":2}'
US, PEER = "12D3us", "12D3peer"
MIB = 1 << 20
Breaks = tuple[str, "Callable[[Observation], Observation]"]


def event(name: str, **fields: Any) -> Event:
    return Event(name, fields=fields)


def admitted(number: int, *, sender: str = US, version: int = 0, group: str = "") -> Event:
    name = group or f"{sender}-{number}"
    return event("admitted", group=name, own=sender == US, sender=sender, number=number, policy_version=version)


def life(*steps: int) -> list[Event]:
    """A start, and steps that each take the own group of their number and a peer's."""
    events = [event("start", peer=US), event("served", version=steps[0] - 1)]
    for step in steps:
        events += [admitted(step, version=step - 1), admitted(step, sender=PEER)]
        events += [event("taken", group=f"{sender}-{step}", step=step) for sender in (US, PEER)]
        events += [event("served", version=step), event("step", step=step, policy_version=step)]
    return events


def row(sender: str, number: int, **changes: Any) -> Row:
    """A group that the step of its number has trained on."""
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
        Process(role, 100 + place, 5, rss_bytes=400 * MIB, num_fds=20, num_threads=8, **changes)
        for place, role in enumerate(roles)
    )


def sound() -> Observation:
    """Three steps and one group that waits, after a crash in the third: it was done twice, and counts once."""
    events = [*life(1, 2, 3)[:-1], event("start", peer=US), event("served", version=2)]
    events += [event("taken", group=f"{sender}-3", step=3) for sender in (US, PEER)]
    events += [event("served", version=3), event("step", step=3, policy_version=3), admitted(4, version=3)]
    rows = [row(sender, number) for number in (2, 3) for sender in (US, PEER)]
    waiting = row(US, 4, state="ready", reason=None, step=None)
    return Observation(
        "a",
        events=tuple(events),
        num_settled=len(events),
        buffer=Buffer((*rows, waiting), forgotten={US: ((1, 1),), PEER: ((1, 1),)}, last_number=4),
        saved=(0, 2, 3),
        processes=processes(),
        status=status(),
        command=status(),
        floor_step=3,
    )


def with_events(*more: Event) -> Callable[[Observation], Observation]:
    return lambda seen: replace(seen, events=(*seen.events, *more), num_settled=seen.num_settled + len(more))


def with_buffer(**changes: Any) -> Callable[[Observation], Observation]:
    return lambda seen: replace(seen, buffer=replace(seen.buffer or Buffer(), **changes))


def with_row(place: int, **changes: Any) -> Callable[[Observation], Observation]:
    def change(seen: Observation) -> Observation:
        rows = list(seen.buffer.rows if seen.buffer else ())
        rows[place] = replace(rows[place], **changes)
        return with_buffer(rows=tuple(rows))(seen)

    return change


def with_status(said: dict[str, Any]) -> Callable[[Observation], Observation]:
    return lambda seen: replace(seen, status=said)


def at_rest(seen: Observation) -> Observation:
    """The node was stopped, and says so."""
    resting = status(state="stopped")
    resting |= {"generation": {"state": "stopped"}, "learner": {"state": "stopped", "step": 3}}
    ended = with_events(event("stop"))(seen)
    return replace(ended, is_running=False, processes=(), status=resting, command=resting)


def without(number: int) -> Callable[[Observation], Observation]:
    """The own group of this number is gone from the buffer."""

    def change(seen: Observation) -> Observation:
        assert seen.buffer is not None
        return with_buffer(rows=tuple(kept for kept in seen.buffer.rows if (kept.sender, kept.number) != (US, number)))(
            seen
        )

    return change


step_again = (event("taken", group=f"{US}-4", step=4), event("step", step=4, policy_version=4))
BREAKS: list[Breaks] = [
    ("no group is lost", with_buffer(forgotten={US: ((1, 1),)})),
    ("every own number is accounted for", with_buffer(last_number=6)),
    ("every own number is accounted for", with_buffer(last_number=3)),
    ("every own number is accounted for", without(3)),
    ("a group is in one state", with_row(4, step=4)),
    ("a group is in one state", with_row(4, state="waiting")),
    ("a group is in one state", with_row(4, state="released")),
    ("the buffer is sound", with_buffer(unsound="page 3 is never used")),
    ("no group is used twice", with_events(event("taken", group=f"{US}-3", step=4))),
    ("trail and buffer agree on what a step used", with_row(0, step=1)),
    ("trail and buffer agree on what a step used", with_row(0, state="ready", reason=None, step=None)),
    ("trail and buffer agree on what a step used", with_row(4, state="released", reason="trained", step=2)),
    ("no group is stuck in a step", with_row(0, state="taken", reason=None)),
    ("a group is admitted once", with_events(admitted(4, version=3))),
    ("a group is admitted once", with_events(admitted(3, sender=PEER, group="another"))),
    ("what was given up stays so", with_events(event("released", group=f"{US}-4"), *step_again)),
    (
        "steps are in order",
        with_events(event("taken", group=f"{US}-4", step=4), event("step", step=3, policy_version=3)),
    ),
    (
        "steps are in order",
        with_events(event("taken", group=f"{US}-4", step=5), event("step", step=5, policy_version=5)),
    ),
    (
        "no step is missing",
        with_events(event("taken", group=f"{US}-4", step=5), event("step", step=5, policy_version=5)),
    ),
    ("served versions rise", with_events(event("served", version=3))),
    (
        "published versions rise",
        with_events(event("taken", group=f"{US}-4", step=4), event("step", step=4, policy_version=2)),
    ),
    ("groups claim versions that were made", with_events(admitted(5, version=9))),
    ("the trail can be read", lambda seen: replace(seen, damaged=("{half",))),
    ("the trail can be read", lambda seen: replace(seen, is_torn=True)),
    ("one peer id over all lives", with_events(event("start", peer="12D3other"))),
    ("no process outlives its time", lambda seen: replace(seen, strays={(7, 1): "learner worker (pid 7)"})),
    ("no zombies", lambda seen: replace(seen, processes=(*seen.processes, Process("other", 7, 1, is_zombie=True)))),
    ("one process of a role", lambda seen: replace(seen, processes=(*seen.processes, Process("p2pd", 7, 1)))),
    ("no file is left", lambda seen: replace(seen, leftovers={("x.tmp", 7): "x.tmp"})),
    ("no file is left", lambda seen: replace(at_rest(seen), leftovers={("run", 7): "run"})),
    ("the status is truthful", with_status(status(state="stopped"))),
    ("the status is truthful", with_status(status(step=2))),
    ("the status is truthful", with_status(status(step=4))),
    ("the status is truthful", with_status(status(peer_id=PEER))),
    ("the status is truthful", with_status({"error": "does not answer"})),
    ("the status is truthful", lambda seen: replace(seen, processes=seen.processes[:2])),
    ("the status is truthful", lambda seen: replace(at_rest(seen), command=status())),
    (
        "the status is truthful",
        lambda seen: with_status(seen.status | {"learner": {"state": "stopped", "step": 2}})(at_rest(seen)),
    ),
]


@pytest.mark.parametrize(
    ("invariant", "breaks"), BREAKS, ids=[f"{name} {place}" for place, (name, _) in enumerate(BREAKS)]
)
def test_what_does_not_hold_at_a_moment_is_seen(invariant: str, breaks: Callable[[Observation], Observation]) -> None:
    found = check(sound(), breaks(sound()), None)
    assert invariant in {violation.invariant for violation in found}
    assert all(violation.figures and violation.node == "a" for violation in found)


def test_the_notes_that_are_missing_are_held_against_the_crashes() -> None:
    many = tuple(row(PEER, number) for number in range(10, 300))
    assert "what is admitted is noted" in names(with_buffer(rows=many)(sound()))


def test_a_crash_a_stop_and_what_a_node_tells_are_no_violations() -> None:
    assert broken(sound()) == []
    assert broken(at_rest(sound())) == []
    killed = replace(sound(), is_running=False, processes=(), status=(said := at_rest(sound()).status), command=said)
    assert broken(replace(killed, is_torn=True, leftovers={("run", 7): "run"})) == []
    again = (event("taken", group=f"{US}-2", step=2), event("step", step=2, policy_version=2))
    earlier = with_events(event("step_lost", step=3), *again)(killed)
    assert "the status is truthful" not in names(earlier), "the status was saved before the learner's death"
    told = without(3)(with_events(event("recovered", file="replay.sqlite"))(sound()))
    assert broken(told) == [], "the node said that part of its buffer was lost"
    taken_up = with_events(
        event("released", group=f"{US}-4"), event("buffer_rolled_back", num_lost=1, num_used=0), *step_again
    )(sound())
    assert "what was given up stays so" not in names(taken_up), "the buffer had lost that it was given up"
    found_after = with_events(event("start", peer=US), admitted(5, version=3))(sound())
    assert names(replace(found_after, floor_step=2)) == {"no group is lost"}, "and of what comes then nothing may be"


@pytest.mark.parametrize(("version", "is_made"), [(5, True), (6, False)])
def test_a_step_that_changed_nothing_counts_in_the_numbers_of_versions(version: int, *, is_made: bool) -> None:
    step = event("taken", group=f"{US}-4", step=4), event("step", step=4, policy_version=3)
    seen = with_events(*step, admitted(5, version=version))(sound())
    assert ("groups claim versions that were made" not in names(seen)) is is_made


@pytest.mark.parametrize(("served", "is_made"), [(7, True), (6, False)])
def test_a_version_of_anothers_learner_may_be_claimed_just_before_it_is_told(served: int, *, is_made: bool) -> None:
    events = (
        event("start", peer=US),
        event("served", version=5),
        admitted(1, version=7),
        event("served", version=served),
    )
    found = list(versions_claimed(replace(sound(), events=events)))
    assert (not found) is is_made


def test_a_step_that_a_crash_took_back_is_done_again_with_the_groups_of_then() -> None:
    events = [*life(1, 2, 3), event("step_lost", step=4), event("taken", group=f"{US}-3", step=2)]
    assert counted(events, saved=1).groups == {1: [f"{US}-1", f"{PEER}-1"], 2: [f"{US}-3"]}
    stands = counted([*life(1, 2, 3), event("start", peer=US)], saved=1)
    assert sorted(stands.groups) == [1], "not tried again yet, they are not done"
    assert stands.steps == (1, 3)
    finished = [*life(1, 2, 3)[:-1], event("start", peer=US), event("step", step=3, policy_version=3)]
    assert sorted(counted(finished, saved=3).groups) == [1, 2, 3], "the learner had finished it, and told the next life"


def test_a_step_below_a_complete_checkpoint_is_seen() -> None:
    again = with_events(event("start", peer=US), event("taken", group=f"{US}-4", step=3))(sound())
    assert "steps never go back below a checkpoint" in {v.invariant for v in check(sound(), again, None)}
    older = replace(sound(), saved=(0, 2))
    assert [v.figures for v in check(sound(), older, None)] == ["the newest checkpoint is of step 2, it was of step 3"]
    set_aside = replace(again, saved=(0, 2), set_aside=frozenset({"damaged-step-00000003"}))
    assert "steps never go back below a checkpoint" not in {v.invariant for v in check(sound(), set_aside, None)}


@pytest.mark.parametrize("grows", ["rss_bytes", "num_fds", "num_threads"])
def test_growth_is_seen_after_a_fault_and_over_a_run(grows: str) -> None:
    before, after = sound(), sound()
    more = {grows: 2000 * MIB if grows == "rss_bytes" else 200}
    after = replace(after, processes=tuple(replace(process, **more) for process in after.processes))
    found = check(before, after, None)
    assert Counter(v.invariant for v in found) == {"memory, descriptors and threads are back": 4}, "of each role"
    runs = [replace(one, floor_step=9) for one in (before, after)]
    assert len(invariants._grown(runs)) == 4
    assert invariants._grown([replace(before, floor_step=0), runs[1]]) == [], "a cold node is no measure"


def test_restarts_are_held_against_the_processes() -> None:
    name = "restarts are counted"
    other = tuple(replace(p, pid=p.pid + 50) if p.role == "learner worker" else p for p in processes())
    replaced = replace(sound(), processes=other)
    assert name in {v.invariant for v in check(sound(), replaced, None)}, "another process, and none counted"
    counted_ = status() | {"learner": {"state": "ready", "restarts": 1, "step": 3}}
    assert check(sound(), with_status(counted_)(replaced), None) == []
    assert name in {v.invariant for v in check(sound(), with_status(status(restarts=1))(sound()), None)}


def test_one_number_for_two_groups_is_seen_over_all_nodes() -> None:
    sender, receiver = sound(), replace(sound(), events=(event("start", peer=PEER), admitted(2, group="another")))
    assert list(two_of_a_number([sender, receiver])) == [f"number 2 of {US} was given to 2 groups"]
    stranger = replace(receiver, events=(event("start", peer=PEER), admitted(2, sender="x", group="another")))
    assert list(two_of_a_number([sender, stranger])) == []


def test_what_held_no_more_before_is_not_told_again() -> None:
    worse = with_row(0, step=1)(sound())
    assert check(worse, worse, None) == []


def test_every_invariant_has_a_history_that_breaks_it() -> None:
    shown = {name for name, _ in BREAKS} | {"what is admitted is noted"}
    assert shown == set(AT_ONE_MOMENT)
    assert set(FROM_ONE_TO_ANOTHER) == {
        "steps never go back below a checkpoint",
        "memory, descriptors and threads are back",
        "restarts are counted",
    }


def test_the_trail_is_remembered_as_it_was_first_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [f'{{"time":{number},"event":"taken","group":"{number}","step":1}}\n' for number in range(4)]
    path.write_text("".join(lines))
    memory = EventLogMemory(path)
    memory.look()
    path.write_text(
        lines[0] + "x" + lines[1][1:] + lines[3] + f"no event\n{NAMELESS}\n" + '{"time":9,"event":"stop"}\n{"half'
    )
    memory.look()
    assert [found.fields.get("group") for found in memory.events] == ["0", "1", "2", "3", None]
    assert (memory.damaged, memory.num_changed, memory.is_torn) == (["no event", NAMELESS], 1, True)


def names(seen: Observation) -> set[str]:
    return {wrong.invariant for wrong in broken(seen)}


def test_the_table_of_what_must_hold_is_in_the_documentation() -> None:
    assert invariants.table() in (Path(__file__).parents[2] / "tests/chaos/README.md").read_text()
