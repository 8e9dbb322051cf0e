"""Invariants of steps, policy versions, the event log and the peer id."""

from collections.abc import Iterator
from itertools import pairwise

from tests.chaos.observation.event_log import RESTARTS, Event, effective_history
from tests.chaos.observation.watch import CHECKPOINT_PREFIX, DAMAGED_PREFIX, Observation


def repeated_before_checkpoint(before: Observation, after: Observation) -> Iterator[str]:
    """A step in a complete checkpoint is not repeated, unless the node has set the checkpoint aside as damaged."""
    floor = max((step for step in before.saved if not _is_set_aside(step, after)), default=0)
    for event in after.events[len(before.events) :]:
        if event.name == "taken" and event["step"] <= floor:
            yield f"step {event['step']} was begun again; the checkpoint of step {floor} was complete"
            return
        if event.name == "step" and event["step"] < floor:
            yield f"step {event['step']} was reported again; the checkpoint of step {floor} was complete"
            return
    if after.newest_saved < floor:
        yield f"the newest checkpoint is of step {after.newest_saved}, it was of step {floor}"


def steps_out_of_order(seen: Observation) -> Iterator[str]:
    """Steps are consecutive while a learner runs. A new learner may resume at an earlier step, but not skip one."""
    reported, may_fall = 0, True
    for event in seen.events:
        if event.name in RESTARTS:
            may_fall = True
        elif event.name == "step":
            step = event["step"]
            if step > reported + 1 or (step != reported + 1 and not may_fall):
                yield f"step {step} came after step {reported}"
            reported, may_fall = step, False


def missing_steps(seen: Observation) -> Iterator[str]:
    """The effective history has every step from the first to the last."""
    history = effective_history(seen.events, saved=seen.newest_saved)
    for earlier, later in pairwise((0, *sorted(history.reports))):
        if later != earlier + 1:
            yield f"steps {earlier + 1} to {later - 1} are missing in the effective history"


def falling_served_versions(seen: Observation) -> Iterator[str]:
    """The generator's version rises while a learner runs. A crash may reset it to the checkpoint."""
    served, is_resuming = 0, True
    for event in seen.events:
        if event.name in RESTARTS:
            is_resuming = True
        elif event.name == "taken":
            is_resuming = False
        elif event.name == "served":
            if event["version"] <= served and not is_resuming:
                yield f"version {event['version']} was served after version {served}"
            served = event["version"]


def wrong_published_versions(seen: Observation) -> Iterator[str]:
    """A step makes the version with its number, or keeps the former version if it changes nothing."""
    reports = effective_history(seen.events, saved=seen.newest_saved).reports
    versions = [(step, reports[step]["policy_version"]) for step in sorted(reports)]
    for (before, older), (after, newer) in pairwise([(0, 0), *versions]):
        if after == before + 1 and newer not in (older, after):
            yield f"step {after} made version {newer}, step {before} had made {older}"


def overclaimed_versions(seen: Observation) -> Iterator[str]:
    """An own group claims a version that exists or that the current step makes.

    The versions of a node without a learner skip numbers. It logs a version when the version is served, so a group may
    claim the next logged version.
    """
    learns = any(event.name == "step" for event in seen.events)
    newest = 0
    claims: list[Event] = []
    for event in seen.events:
        if event.name == "served":
            newest = max(newest, event["version"])
            yield from (_overclaimed(claim, newest) for claim in claims if claim["policy_version"] > newest)
            claims = []
        elif event.name == "step":
            newest = max(newest, event["step"])
        elif event.name == "admitted" and event["own"] and event["policy_version"] > newest + 1:
            if learns:
                yield _overclaimed(event, newest)
            else:
                claims.append(event)


def _overclaimed(group: Event, newest: int) -> str:
    return f"own group {group['number']} claims version {group['policy_version']}, step {newest} was the newest"


def unreadable_events(seen: Observation) -> Iterator[str]:
    """Each line is an event. A killed node may leave a partial last line, which the next start truncates."""
    for line in seen.damaged:
        yield f"a line is no event: {line!r}"
    if seen.is_torn and seen.is_running:
        yield "the event log of a running node ends with a partial line"


def peer_id_changes(seen: Observation) -> Iterator[str]:
    """The node has the same peer id after every start."""
    peers = {str(event["peer"]) for event in seen.events if event.name == "start"}
    if len(peers) > 1:
        yield f"{len(peers)} peer ids: {', '.join(sorted(peer[-8:] for peer in peers))}"


def _is_set_aside(step: int, seen: Observation) -> bool:
    return f"{DAMAGED_PREFIX}{CHECKPOINT_PREFIX}{step:08d}" in seen.set_aside
