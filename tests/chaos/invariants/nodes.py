"""Invariants of one node: its steps and versions, event log, processes and files, status and bans.

Memory and descriptors vary with steps and peers, so growth has a tolerance. The comparison over a whole run finds more:
growth within the tolerance of each single fault.
"""

import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from tests.chaos.invariants.groups import peer_of
from tests.chaos.observation.processes import by_role
from tests.chaos.observation.records import RESTARTS, Event, effective_history
from tests.chaos.observation.watch import CHECKPOINT_PREFIX, DAMAGED_PREFIX, Observation

SINGLE_ROLES = ("daemon", "generation worker", "learner worker", "p2pd")
MIB = 1 << 20
GROWTH_SHARE = 0.25  # allowed, and beside it these amounts
GROWTH = {"rss_bytes": 128 * MIB, "num_fds": 32, "num_threads": 16}


def orphans(seen: Observation) -> Iterator[str]:
    """No process of a former daemon, or of a node that does not run, is running."""
    for text in seen.orphans.values():
        yield f"orphan process: {text}"


def zombies(seen: Observation) -> Iterator[str]:
    """The parent of each ended process has waited for it."""
    for process in seen.processes:
        if process.is_zombie:
            yield f"pid {process.pid} is a zombie"


def duplicates(seen: Observation) -> Iterator[str]:
    """There is one daemon, one p2pd, and at most one worker of each kind."""
    for role, members in by_role(seen.processes).items():
        if role in SINGLE_ROLES and len(members) > 1:
            yield f"{len(members)} processes are the {role}: {', '.join(str(member.pid) for member in members)}"


def leftover_files(seen: Observation) -> Iterator[str]:
    """There is no temporary file and no dead socket. A stopped node has no sockets and no weights in memory."""
    has_crashed = not seen.is_running and not seen.ended_in_order
    for path in seen.leftovers.values() if not has_crashed else ():  # after a crash the next start removes them
        yield f"leftover file: {path}"


def growth(before: Observation, after: Observation) -> Iterator[str]:
    """Memory, descriptors and threads of each role do not grow beyond a tolerance."""
    if not (before.is_running and after.is_running):
        return
    old, new = by_role(before.processes), by_role(after.processes)
    for role in (*SINGLE_ROLES, "engine core", "other"):
        if not old.get(role) or not new.get(role):
            continue
        for quantity, amount in GROWTH.items():
            was, now = (sum(getattr(process, quantity) for process in some[role]) for some in (old, new))
            if now > was * (1 + GROWTH_SHARE) + amount:
                yield f"{quantity} of the {role} grew from {was:,} to {now:,}"


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


DAY_S = 86_400.0  # no fault moves the clock so far
WORKERS = {"generation": "generation worker", "learner": "learner worker"}


def errors_of_status(seen: Observation) -> Iterator[str]:
    """`/status` is correct, with a delay of seconds. A stopped node is reported as stopped."""
    if not seen.has_event_log:
        return
    if "error" in seen.status or not seen.status:
        yield f"no answer: {seen.status.get('error', 'empty')}"
    else:
        yield from _errors_of_document(seen.status, seen)


def restarts_not_counted(before: Observation, after: Observation) -> Iterator[str]:
    """While one daemon runs, a worker's process changes exactly if its number of restarts grows, or after a pause."""
    if not _same(before, after, "daemon") or _num_pauses(before) != _num_pauses(after):
        return
    for section, role in WORKERS.items():
        then, now = _restarts(before.status, section), _restarts(after.status, section)
        if then is None or now is None:
            continue
        if now < then:
            yield f"{section}.restarts fell from {then} to {now}"
        if _same(before, after, role) is (now > then) and _has(before, role) and _has(after, role):
            which = "the same" if _same(before, after, role) else "another"
            yield f"{section}.restarts went from {then} to {now}, and the worker is {which} process"


def _num_pauses(seen: Observation) -> int:
    return sum(event.name in ("pause_began", "pause_ended") for event in seen.events)


def lost_bans(before: Observation, after: Observation) -> Iterator[str]:
    """A ban of more than a day is kept, unless the node has set the damaged file of its peers aside."""
    if not any(event.name == "recovered" and event["file"] == "peers.sqlite" for event in after.events):
        for peer, until in before.bans.items():
            if until > time.time() + DAY_S and peer not in after.bans:
                yield f"the ban of {peer[-8:]} is lost"


def _errors_of_document(document: Mapping[str, Any], seen: Observation) -> Iterator[str]:
    state = document["node"]["state"]
    if state != ("running" if seen.is_running else "stopped"):
        yield f"the node is {'running' if seen.is_running else 'not running'}, reported as {state}"
    if document["node"]["peer_id"] != peer_of(seen):
        yield f"peer id {document['node']['peer_id']!r}, the event log has {peer_of(seen)!r}"
    for section, role in WORKERS.items():
        worker_state = document[section]["state"]
        if worker_state == "ready" and not _has(seen, role):
            yield f"the {role} is reported as ready, and there is none"
        if not seen.is_running and worker_state not in ("stopped", "off"):  # off: the node's role has no such worker
            yield f"the {role} of a node that does not run is reported as {worker_state}"
    yield from _errors_of_step(document["learner"]["step"], seen)


def _errors_of_step(step: int, seen: Observation) -> Iterator[str]:
    lowest, highest = effective_history(seen.events, saved=seen.newest_saved).steps
    if seen.is_running:
        lowest = min(lowest, seen.floor_step)
    elif not seen.ended_in_order:
        # The status of a killed node is some seconds old. It may be older than a crash of the learner that undid steps.
        lowest, highest = 0, max((event["step"] for event in seen.events if event.name == "step"), default=highest)
    if not lowest <= step <= highest:
        yield f"step {step}; by the event log it is {lowest if lowest == highest else f'{lowest} to {highest}'}"


def _restarts(document: Mapping[str, Any], section: str) -> int | None:
    return document[section]["restarts"] if section in document else None


def _has(seen: Observation, role: str) -> bool:
    return any(process.role == role and not process.is_zombie for process in seen.processes)


def _same(before: Observation, after: Observation, role: str) -> bool:
    """Return whether this role has the same processes before and after."""
    then = {process.identity for process in before.processes if process.role == role}
    return then == {process.identity for process in after.processes if process.role == role}
