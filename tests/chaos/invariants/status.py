"""The status tells the truth: what `/status` and `status --json` say, against what is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.chaos.invariants.groups import peer_of
from tests.chaos.observing.trail import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.chaos.observing.observe import Observation

WORKERS = {"generation": "generation worker", "learner": "learner worker"}


def untruths(seen: Observation) -> Iterator[str]:
    """What `/status` and `status --json` say is so, or was seconds ago; a stopped node is said to be stopped."""
    if not seen.has_trail:
        return
    for channel, said in (("/status", seen.status), ("status --json", seen.command)):
        if "error" in said or not said:
            yield f"{channel} says nothing: {said.get('error', 'empty')}"
        else:
            yield from (f"{channel}: {untruth}" for untruth in _of_document(said, seen))


def restarts_not_counted(before: Observation, after: Observation) -> Iterator[str]:
    """Within one life of the daemon a worker is another process exactly where its restarts grew."""
    if not _same(before, after, "daemon"):
        return
    for section, role in WORKERS.items():
        then, now = _restarts(before.status, section), _restarts(after.status, section)
        if then is None or now is None:
            continue
        if now < then:
            yield f"{section}.restarts fell from {then} to {now}"
        if _same(before, after, role) is (now > then) and _has(before, role) and _has(after, role):
            is_other = "the same" if _same(before, after, role) else "another"
            yield f"{section}.restarts went from {then} to {now}, and the worker is {is_other} process"


def _of_document(said: Mapping[str, Any], seen: Observation) -> Iterator[str]:
    state = said["node"]["state"]
    if state != ("running" if seen.is_running else "stopped"):
        yield f"the node is {'running' if seen.is_running else 'not running'}, said to be {state}"
    if said["node"]["peer_id"] != peer_of(seen):
        yield f"peer id {said['node']['peer_id']!r}, the trail has {peer_of(seen)!r}"
    for section, role in WORKERS.items():
        worker_state = said[section]["state"]
        if worker_state == "ready" and not _has(seen, role):
            yield f"the {role} is said to be ready, and there is none"
        if not seen.is_running and worker_state not in ("stopped", "off"):  # off: its role does without
            yield f"the {role} of a node that does not run is said to be {worker_state}"
    yield from _of_step(said["learner"]["step"], seen)


def _of_step(step: int, seen: Observation) -> Iterator[str]:
    lowest, highest = counted(seen.events, saved=seen.newest_saved).steps
    if seen.is_running:
        lowest = min(lowest, seen.floor_step)
    elif not seen.ended_in_order:
        # What a killed node left is some seconds old, perhaps of before a learner's death that undid steps.
        lowest, highest = 0, max((event["step"] for event in seen.events if event.name == "step"), default=highest)
    if not lowest <= step <= highest:
        yield f"step {step}; by the trail it is {lowest if lowest == highest else f'{lowest} to {highest}'}"


def _restarts(said: Mapping[str, Any], section: str) -> int | None:
    return said[section]["restarts"] if section in said else None


def _has(seen: Observation, role: str) -> bool:
    return any(process.role == role and not process.is_zombie for process in seen.processes)


def _same(before: Observation, after: Observation, role: str) -> bool:
    """Whether the processes of this role are the same ones."""
    then = {process.identity for process in before.processes if process.role == role}
    return then == {process.identity for process in after.processes if process.role == role}
