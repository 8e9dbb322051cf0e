"""Steps and versions go on and never back; the trail can be read; the node is one and the same over all its lives."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from tests.chaos.observing.observe import CHECKPOINT_PREFIX, DAMAGED_PREFIX
from tests.chaos.observing.trail import BEGINNINGS, counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.chaos.observing.observe import Observation
    from tests.chaos.observing.trail import Event


def back_below_checkpoint(before: Observation, after: Observation) -> Iterator[str]:
    """What a complete checkpoint held before stays done, unless the node has set that checkpoint aside as damaged."""
    floor = max((step for step in before.saved if not _is_set_aside(step, after)), default=0)
    for event in after.events[len(before.events) :]:
        if event.name == "taken" and event["step"] <= floor:
            yield f"step {event['step']} was begun again; the checkpoint of step {floor} was complete"
            return
        if event.name == "step" and event["step"] < floor:
            yield f"step {event['step']} was done again; the checkpoint of step {floor} was complete"
            return
    if after.newest_saved < floor:
        yield f"the newest checkpoint is of step {after.newest_saved}, it was of step {floor}"


def steps_in_order(seen: Observation) -> Iterator[str]:
    """Within one life of the learner each step follows the one before; a new life goes on at most one further."""
    noted, may_fall = 0, True
    for event in seen.events:
        if event.name in BEGINNINGS:
            may_fall = True
        elif event.name == "step":
            step = event["step"]
            if step > noted + 1 or (step != noted + 1 and not may_fall):
                yield f"step {step} came after step {noted}"
            noted, may_fall = step, False


def no_gap(seen: Observation) -> Iterator[str]:
    """The history that counts has every step from the first to the last."""
    history = counted(seen.events, saved=seen.newest_saved)
    for earlier, later in pairwise((0, *sorted(history.reports))):
        if later != earlier + 1:
            yield f"steps {earlier + 1} to {later - 1} are missing in the history that counts"


def versions_served(seen: Observation) -> Iterator[str]:
    """Within one life of the learner the generator's versions rise. A crash may take both back, to the checkpoint."""
    served, is_settling = 0, True
    for event in seen.events:
        if event.name in BEGINNINGS:
            is_settling = True
        elif event.name == "taken":
            is_settling = False
        elif event.name == "served":
            if event["version"] <= served and not is_settling:
                yield f"version {event['version']} was served after version {served}"
            served = event["version"]


def versions_published(seen: Observation) -> Iterator[str]:
    """A step makes the version of its own number or, where it changes nothing, stays with the one before."""
    reports = counted(seen.events, saved=seen.newest_saved).reports
    versions = [(step, reports[step]["policy_version"]) for step in sorted(reports)]
    for (before, older), (after, newer) in pairwise([(0, 0), *versions]):
        if after == before + 1 and newer not in (older, after):
            yield f"step {after} made version {newer}, step {before} had made {older}"


def versions_claimed(seen: Observation) -> Iterator[str]:
    """No own group claims a version that was not made by then, but the one of the step under way.

    A node without a learner has versions that skip numbers, and tells of one when it is served: the next that it tells
    of may be claimed before.
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


def trail_parses(seen: Observation) -> Iterator[str]:
    """Each line is an event; a killed life may leave half a last line, which the next one cuts off."""
    for line in seen.damaged:
        yield f"a line is no event: {line!r}"
    if seen.is_torn and seen.is_running:
        yield "the trail of a running node ends with half a line"


def one_peer_id(seen: Observation) -> Iterator[str]:
    """All lives are one member of the swarm."""
    peers = {str(event["peer"]) for event in seen.events if event.name == "start"}
    if len(peers) > 1:
        yield f"{len(peers)} peer ids: {', '.join(sorted(peer[-8:] for peer in peers))}"


def _is_set_aside(step: int, seen: Observation) -> bool:
    return f"{DAMAGED_PREFIX}{CHECKPOINT_PREFIX}{step:08d}" in seen.set_aside
