"""Invariants of the status, which agrees with processes and event log, and of bans."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from tests.chaos.invariants.groups import peer_of
from tests.chaos.observation.event_log import effective_history
from tests.chaos.observation.watch import Observation

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
