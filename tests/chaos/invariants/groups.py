"""Invariants of groups: none is lost or used twice. They compare the event log with the buffer.

A node writes a group to the buffer first and then to the event log. So the buffer must contain each logged group. A
crash may lose the log lines of one commit.

If the disk lost a part of the buffer, the node must log it (`recovered`). The buffer is then compared with the later
events only. A loss that was not logged is a violation.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ftis_node.node.loops.intake import COMMIT_CAPACITY
from ftis_node.swarm.sequence import epoch_base, epoch_of
from tests.chaos.observation.records import Event, Row, effective_history
from tests.chaos.observation.watch import Observation

TRAINED_REASONS = frozenset({"trained", "refused"})


def lost_groups(seen: Observation) -> Iterator[str]:
    """Each group that was logged as admitted is in the buffer or was pruned."""
    if seen.buffer is None:
        return
    kept, settled = {row.id for row in seen.buffer.rows}, seen.events[: seen.num_settled]
    for event in settled[complete_since(seen) :]:
        if event.name == "admitted" and event["group"] not in kept:
            if not seen.buffer.has_pruned(event["sender"], event["number"]):
                yield f"group {event['group'][:12]} (number {event['number']}) was admitted and is in no state"


def missing_numbers(seen: Observation) -> Iterator[str]:
    """The numbers of own groups are consecutive in each epoch: each up to the last is in the buffer or was pruned."""
    if seen.buffer is None:
        return
    last_number, expected = seen.buffer.last_number, 0
    stored = [row.number for row in seen.buffer.rows if row.own]
    intervals = [*((number, number) for number in stored), *seen.buffer.pruned.get(peer_of(seen), ())]
    for first, last in [*sorted(intervals), (last_number + 1,) * 2]:
        expected = max(expected, epoch_base(epoch_of(first)) + 1)
        if first > expected:
            yield f"own groups {expected} to {first - 1} are neither stored nor pruned"
        expected = max(expected, last + 1)
    if stored and max(stored) > last_number:
        yield f"own group {max(stored)} has a number above the last assigned, {last_number}"


def invalid_states(seen: Observation) -> Iterator[str]:
    """Each stored group is in exactly one state, and its step and reason fit the state."""
    for row in seen.buffer.rows if seen.buffer else ():
        fits = {
            "ready": row.step is None and row.reason is None,
            "taken": row.step is not None and row.reason is None,
            "released": row.reason is not None and (row.reason not in TRAINED_REASONS or row.step is not None),
        }
        if not fits.get(row.state, False):
            yield f"group {row.id[:12]} is {row.state}, reason {row.reason}, step {row.step}"


def integrity_errors(seen: Observation) -> Iterator[str]:
    """SQLite's integrity check of the file succeeds."""
    if seen.buffer and seen.buffer.integrity_error:
        yield seen.buffer.integrity_error


def used_twice(seen: Observation) -> Iterator[str]:
    """In the effective history, each group is trained on once."""
    steps: dict[str, list[int]] = {}
    for step, groups in effective_history(seen.events, saved=seen.newest_saved).groups.items():
        for group in groups:
            steps.setdefault(group, []).append(step)
    for group, used in steps.items():
        if len(used) > 1:
            yield f"group {group[:12]} was used by steps {', '.join(map(str, used))}"


def step_differences(seen: Observation) -> Iterator[str]:
    """For each complete step, buffer and event log contain the same groups."""
    if seen.buffer is None:
        return
    history = effective_history(seen.events, saved=seen.newest_saved)
    taken = (event["step"] for event in seen.events[complete_since(seen) :] if event.name == "taken")
    since = next(taken, history.reported)
    done, _ = effective_history(seen.events[: seen.num_settled], saved=seen.newest_saved).steps
    by_id = {row.id: row for row in seen.buffer.rows}
    names = {step: set(groups) for step, groups in history.groups.items()}
    for step, groups in names.items():
        for group in groups if since <= step < done else ():
            if (row := by_id.get(group)) is not None and not _is_used(row, step):
                state = f"{row.state}, reason {row.reason}, step {row.step}"
                yield f"group {group[:12]} was taken by step {step}; in the buffer it is {state}"
    for row in seen.buffer.rows:
        if row.step is not None and since <= row.step < done and _is_used(row, row.step):
            if row.id not in names.get(row.step, ()):
                yield f"group {row.id[:12]} was trained by step {row.step} in the buffer, but not in the event log"


def stuck(seen: Observation) -> Iterator[str]:
    """No group is still taken by a complete step."""
    done, _ = effective_history(seen.events[: seen.num_settled], saved=seen.newest_saved).steps
    for row in seen.buffer.rows if seen.buffer and seen.is_running else ():
        if row.state == "taken" and row.step is not None and row.step < done:
            yield f"group {row.id[:12]} is still taken by step {row.step}, after step {done}"


def admitted_twice(seen: Observation) -> Iterator[str]:
    """Each group is admitted once, and no two groups of a sender have the same number."""
    admitted = [event for event in seen.events if event.name == "admitted"]
    recent = [event["group"] for event in seen.events[complete_since(seen) :] if event.name == "admitted"]
    for group, count in Counter(recent).items():
        if count > 1:
            yield f"group {group[:12]} was admitted {count} times"
    yield from _shared_numbers(admitted)


def used_after_release(seen: Observation) -> Iterator[str]:
    """A group that was released unused is not taken later, unless the buffer lost the release."""
    released: set[str] = set()
    for event in seen.events[complete_since(seen) :]:
        if event.name == "released":
            released.add(event["group"])
        elif event.name == "taken" and event["group"] in released:
            yield f"group {event['group'][:12]} was released and taken by step {event['step']} afterwards"


def not_logged(seen: Observation) -> Iterator[str]:
    """Each stored group is in the event log; a crash loses the lines of one commit at most."""
    if seen.buffer is None:
        return
    logged = {event["group"] for event in seen.events if event.name == "admitted"}
    num_crashes = sum(event.name == "start" for event in seen.events) - sum(e.name == "stop" for e in seen.events)
    missing = [row for row in seen.buffer.rows if row.id not in logged]
    allowed = COMMIT_CAPACITY * (num_crashes + 1)  # one more commit, because the newest groups are being logged now
    if len(missing) > allowed:
        yield f"{len(missing)} stored groups are not in the event log; {num_crashes} crashes explain {allowed}"


def shared_numbers(members: Sequence[Observation]) -> Iterator[str]:
    """Each number of a member of the swarm belongs to one group, on all nodes."""
    peers = {peer_of(seen) for seen in members}
    admitted = [event for seen in members for event in seen.events if event.name == "admitted"]
    yield from _shared_numbers(event for event in admitted if event["sender"] in peers)


def lost_acknowledged(members: Sequence[Observation]) -> Iterator[str]:
    """Each group that a stopped member has acknowledged to its sender is in the member's buffer or was pruned."""
    by_peer = {peer_of(seen): seen for seen in members}
    has_lost = {peer: complete_since(seen) > 0 for peer, seen in by_peer.items()}  # and has reported it
    kept = {peer: {row.id for row in seen.buffer.rows} for peer, seen in by_peer.items() if seen.buffer is not None}
    for sender, seen in by_peer.items():
        numbers = {event["group"]: event["number"] for event in seen.events if event.name == "admitted"}
        for event in seen.events:
            receiver = by_peer.get(event["peer"]) if event.name == "confirmed" else None
            if receiver is None or receiver.buffer is None or has_lost[event["peer"]]:
                continue
            group, number = event["group"], numbers.get(event["group"])
            is_kept = group in kept[event["peer"]]
            if number is not None and not is_kept and not receiver.buffer.has_pruned(sender, number):
                yield f"group {group[:12]} (number {number}) is lost, which node {receiver.node} had acknowledged"


def peer_of(seen: Observation) -> str:
    """Return the node's peer id by its event log, or ""."""
    return next((str(event["peer"]) for event in seen.events if event.name == "start"), "")


def complete_since(seen: Observation) -> int:
    """Return the position after the last event that reports a loss of the buffer, or 0."""
    losses = [position for position, event in enumerate(seen.events) if _reports_loss(event)]
    return losses[-1] + 1 if losses else 0


def _reports_loss(event: Event) -> bool:
    return event.name == "recovered" and event["file"] == "replay.sqlite"


def _is_used(row: Row, step: int) -> bool:
    return row.step == step and (row.state == "taken" or row.reason in TRAINED_REASONS)


def _shared_numbers(admitted: Iterable[Event]) -> Iterator[str]:
    groups: dict[tuple[str, int], set[str]] = {}
    for event in admitted:
        groups.setdefault((event["sender"], event["number"]), set()).add(event["group"])
    for (sender, number), names in groups.items():
        if len(names) > 1:
            yield f"number {number} of {sender[-8:]} belongs to {len(names)} groups"
