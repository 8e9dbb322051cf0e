"""No group is lost or used twice: the trail's word against the buffer's.

A group is written to the buffer first and noted in the trail afterwards, so of what the trail says the buffer must
know. The other way round a crash may cost the note: of the groups of one commit, no more.

If a disk lost part of the buffer, the node must report it (`recovered`, `buffer_rolled_back`). From then on the buffer
is compared with what the trail says after that. What it does not say is a violation.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ftis_node.node.loops.intake import COMMIT_CAPACITY
from tests.chaos.observing.trail import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.chaos.observing.buffer import Row
    from tests.chaos.observing.observe import Observation
    from tests.chaos.observing.trail import Event

TRAINED_REASONS = frozenset({"trained", "refused"})


def lost_groups(seen: Observation) -> Iterator[str]:
    """What was admitted by the trail's word is kept, or was pruned."""
    if seen.buffer is None:
        return
    kept, settled = {row.id for row in seen.buffer.rows}, seen.events[: seen.num_settled]
    for event in settled[whole_since(seen) :]:
        if event.name == "admitted" and event["group"] not in kept:
            if not seen.buffer.has_forgotten(event["sender"], event["number"]):
                yield f"group {event['group'][:12]} (number {event['number']}) was admitted and is in no state"


def lost_numbers(seen: Observation) -> Iterator[str]:
    """Own groups get one number after the other: each up to the last is kept or pruned."""
    if seen.buffer is None:
        return
    since = whole_since(seen)
    noted = [event["number"] for event in seen.events[since:] if event.name == "admitted" and event["own"]]
    held = [row.number for row in seen.buffer.rows if row.own]
    expected = 1 if since == 0 else min(noted, default=seen.buffer.last_number + 1)
    intervals = [*((number, number) for number in held), *seen.buffer.forgotten.get(peer_of(seen), ())]
    for first, last in [*sorted(intervals), (seen.buffer.last_number + 1,) * 2]:
        if first > expected:
            yield f"own groups {expected} to {first - 1} are neither kept nor pruned"
        expected = max(expected, last + 1)
    if held and max(held) > seen.buffer.last_number:
        yield f"own group {max(held)} has a number above the last that was given, {seen.buffer.last_number}"


def states(seen: Observation) -> Iterator[str]:
    """Each kept group is in exactly one state, and what goes with the state goes with it."""
    for row in seen.buffer.rows if seen.buffer else ():
        fits = {
            "ready": row.step is None and row.reason is None,
            "taken": row.step is not None and row.reason is None,
            "released": row.reason is not None and (row.reason not in TRAINED_REASONS or row.step is not None),
        }
        if not fits.get(row.state, False):
            yield f"group {row.id[:12]} is {row.state}, reason {row.reason}, step {row.step}"


def unsound(seen: Observation) -> Iterator[str]:
    """The file is what SQLite calls sound."""
    if seen.buffer and seen.buffer.unsound:
        yield seen.buffer.unsound


def used_twice(seen: Observation) -> Iterator[str]:
    """In the history of steps that counts, each group is trained on once."""
    steps: dict[str, list[int]] = {}
    for step, groups in counted(seen.events, saved=seen.newest_saved).groups.items():
        for group in groups:
            steps.setdefault(group, []).append(step)
    for group, used in steps.items():
        if len(used) > 1:
            yield f"group {group[:12]} was used by steps {', '.join(map(str, used))}"


def used_otherwise(seen: Observation) -> Iterator[str]:
    """Of each step that is done, the buffer and the trail name the same groups."""
    if seen.buffer is None:
        return
    history = counted(seen.events, saved=seen.newest_saved)
    since = next((event["step"] for event in seen.events[whole_since(seen) :] if event.name == "taken"), history.noted)
    done, _ = counted(seen.events[: seen.num_settled], saved=seen.newest_saved).steps
    by_id = {row.id: row for row in seen.buffer.rows}
    names = {step: set(groups) for step, groups in history.groups.items()}
    for step, groups in names.items():
        for group in groups if since <= step < done else ():
            if (row := by_id.get(group)) is not None and not _is_used(row, step):
                stands = f"{row.state}, reason {row.reason}, step {row.step}"
                yield f"group {group[:12]} was taken by step {step}; in the buffer it is {stands}"
    for row in seen.buffer.rows:
        if row.step is not None and since <= row.step < done and _is_used(row, row.step):
            if row.id not in names.get(row.step, ()):
                yield f"group {row.id[:12]} was trained by step {row.step}: the buffer has it so, the trail has not"


def stuck(seen: Observation) -> Iterator[str]:
    """No group is still in the hand of a step that is over."""
    done, _ = counted(seen.events[: seen.num_settled], saved=seen.newest_saved).steps
    for row in seen.buffer.rows if seen.buffer and seen.is_running else ():
        if row.state == "taken" and row.step is not None and row.step < done:
            yield f"group {row.id[:12]} is still taken by step {row.step}, after step {done}"


def admitted_twice(seen: Observation) -> Iterator[str]:
    """Each group passes the door once, and no sender's number is given to two."""
    admitted = [event for event in seen.events if event.name == "admitted"]
    lately = [event["group"] for event in seen.events[whole_since(seen) :] if event.name == "admitted"]
    for group, count in Counter(lately).items():
        if count > 1:
            yield f"group {group[:12]} was admitted {count} times"
    yield from _two_of_a_number(admitted)


def used_after_release(seen: Observation) -> Iterator[str]:
    """What was given up unused is not taken later; a buffer that lost writes may have lost that it was given up."""
    released: set[str] = set()
    for event in seen.events[whole_since(seen) :]:
        if event.name == "released":
            released.add(event["group"])
        elif event.name == "taken" and event["group"] in released:
            yield f"group {event['group'][:12]} was given up and taken by step {event['step']} afterwards"


def not_noted(seen: Observation) -> Iterator[str]:
    """A crash costs the notes of one commit at most."""
    if seen.buffer is None:
        return
    noted = {event["group"] for event in seen.events if event.name == "admitted"}
    num_crashes = sum(event.name == "start" for event in seen.events) - sum(e.name == "stop" for e in seen.events)
    missing = [row for row in seen.buffer.rows if row.id not in noted]
    allowed = COMMIT_CAPACITY * (num_crashes + 1)  # the present life's newest groups are being noted just now
    if len(missing) > allowed:
        yield f"{len(missing)} groups are in the buffer and not in the trail; {num_crashes} crashes explain {allowed}"


def two_of_a_number(members: Iterable[Observation]) -> Iterator[str]:
    """Over all nodes: what the members of this swarm sent under one number is one group, wherever it was admitted."""
    watched = list(members)
    peers = {peer_of(seen) for seen in watched}
    admitted = [event for seen in watched for event in seen.events if event.name == "admitted"]
    yield from _two_of_a_number(event for event in admitted if event["sender"] in peers)


def peer_of(seen: Observation) -> str:
    """The node's peer id by the word of its trail; "" before it has one."""
    return next((str(event["peer"]) for event in seen.events if event.name == "start"), "")


def whole_since(seen: Observation) -> int:
    """The position in the trail since which the buffer has lost nothing: after the node last said that it had."""
    told = [position for position, event in enumerate(seen.events) if _tells_of_loss(event)]
    return told[-1] + 1 if told else 0


def _tells_of_loss(event: Event) -> bool:
    return event.name == "buffer_rolled_back" or (event.name == "recovered" and event["file"] == "replay.sqlite")


def _is_used(row: Row, step: int) -> bool:
    return row.step == step and (row.state == "taken" or row.reason in TRAINED_REASONS)


def _two_of_a_number(admitted: Iterable[Event]) -> Iterator[str]:
    groups: dict[tuple[str, int], set[str]] = {}
    for event in admitted:
        groups.setdefault((event["sender"], event["number"]), set()).add(event["group"])
    for (sender, number), names in groups.items():
        if len(names) > 1:
            yield f"number {number} of {sender[-8:]} was given to {len(names)} groups"
