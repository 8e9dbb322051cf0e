"""The invariants after each fault and at the end of a run, as functions from observations to violations.

    before = snapshot(node)
    ...                                           # the fault, and the node's recovery
    found = check(before, snapshot(node), fault)  # new violations
    ...
    found = check_end(swarm)                      # over the whole run; the nodes may run or be stopped

An invariant of a state takes one observation with all events. An invariant of a change compares two observations. None
depends on the fault. A violation names the invariant, the node, the fault and the figures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tests.chaos.faults.base import Fault
from tests.chaos.invariants import groups, leftovers, status, steps
from tests.chaos.observation.processes import Watched
from tests.chaos.observation.watch import SETTLE_S, Observation, watch_of
from tests.chaos.swarm import Swarm

MAX_REPORTED = 5  # violations of one invariant in one observation: a fault that loses one group may lose all
ALL_NODES = "all"  # instead of a node's name, for an invariant over all nodes
WARM_STEPS = 5  # after so many steps the memory of a node has its usual size
GROWTH = "memory, descriptors and threads do not grow"

OF_A_STATE: dict[str, Callable[[Observation], Iterator[str]]] = {
    "no group is lost": groups.lost_groups,
    "no own number is missing": groups.missing_numbers,
    "a group is in one state": groups.invalid_states,
    "the buffer is intact": groups.integrity_errors,
    "no group is used twice": groups.used_twice,
    "event log and buffer agree on the groups of a step": groups.step_differences,
    "no group is stuck in a step": groups.stuck,
    "a group is admitted once": groups.admitted_twice,
    "a released group is not used": groups.used_after_release,
    "admitted groups are logged": groups.not_logged,
    "steps are in order": steps.steps_out_of_order,
    "no step is missing": steps.missing_steps,
    "served versions rise": steps.falling_served_versions,
    "published versions rise": steps.wrong_published_versions,
    "own groups claim existing versions": steps.overclaimed_versions,
    "the event log is readable": steps.unreadable_events,
    "the peer id does not change": steps.peer_id_changes,
    "no orphan process": leftovers.orphans,
    "no zombie process": leftovers.zombies,
    "one process per role": leftovers.duplicates,
    "no leftover file": leftovers.leftover_files,
    "the status is correct": status.errors_of_status,
}
OF_A_CHANGE: dict[str, Callable[[Observation, Observation], Iterator[str]]] = {
    "no step before a checkpoint is repeated": steps.repeated_before_checkpoint,
    GROWTH: leftovers.growth,
    "restarts are counted": status.restarts_not_counted,
}
TRANSIENT = (  # a node has a moment to correct these
    *(steps.unreadable_events, leftovers.orphans, leftovers.zombies, leftovers.duplicates, leftovers.leftover_files),
    status.errors_of_status,
)


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated invariant with the node, the fault before it ("" at the end of a run) and the figures."""

    invariant: str
    node: str
    fault: str
    figures: str

    def __str__(self) -> str:
        when = f"after {self.fault}" if self.fault else "at the end"
        return f"{self.invariant}: node {self.node}, {when}: {self.figures}"


def table() -> str:
    """Return the table of invariants in tests/chaos/README.md."""
    invariants = [*OF_A_STATE.items(), *OF_A_CHANGE.items()]
    rows = [f"| {name} | {inspect.cleandoc(violated.__doc__ or '').splitlines()[0]} |" for name, violated in invariants]
    return "\n".join(["| invariant | meaning |", "|---|---|", *rows])


class Finding(NamedTuple):
    """A violated invariant with the figures."""

    invariant: str
    figures: str


def snapshot(node: Watched, *, settle_s: float = SETTLE_S) -> Observation:
    """Observe the node; wait up to `settle_s` until transient problems are gone."""
    return watch_of(node).observe(unsettled=unsettled, settle_s=settle_s)


def last_seen(node: Watched) -> Observation | None:
    """Return the last observation of the node, or None."""
    return watch_of(node).last


def unsettled(seen: Observation) -> list[str]:
    """Return the problems that may be transient."""
    return [figures for violated in TRANSIENT for figures in violated(seen)]


def findings(seen: Observation) -> list[Finding]:
    """Return the violated invariants of a state."""
    return [Finding(name, figures) for name, violated in OF_A_STATE.items() for figures in violated(seen)]


def check(before: Observation, after: Observation, fault: Fault | None) -> list[Violation]:
    """Return the violations that are new after `fault`, at most `MAX_REPORTED` of each invariant."""
    known = set(findings(before))
    found = [finding for finding in findings(after) if finding not in known]
    for name, violated in OF_A_CHANGE.items():
        found += [Finding(name, figures) for figures in violated(before, after)]
    return _violations(found, node=after.node, fault=fault.name if fault else "")


def check_end(swarm: Swarm) -> list[Violation]:
    """Return the violations over the whole run. The nodes may run or be stopped.

    A violation that was reported after a fault is reported again if it still exists.
    """
    found: list[Violation] = []
    last = [(watch_of(node), snapshot(node)) for node in (*swarm.nodes, swarm.bootstrap)]
    for watch, seen in last:
        found += _violations(findings(seen), node=seen.node, fault="")
        found += [replace(violation, figures=f"over the run {violation.figures}") for violation in _growth(watch.seen)]
    shared = [Finding("one group per number", figures) for figures in groups.shared_numbers(seen for _, seen in last)]
    return found + _violations(shared, node=ALL_NODES, fault="")


def _growth(seen: Sequence[Observation]) -> list[Violation]:
    """Compare the first observation of a warm node with the last."""
    warm = [one for one in seen if one.is_running and one.floor_step >= WARM_STEPS]
    if len(warm) < 2:
        return []
    found = [Finding(GROWTH, figures) for figures in leftovers.growth(warm[0], warm[-1])]
    return _violations(found, node=warm[0].node, fault="")


def _violations(found: Sequence[Finding], *, node: str, fault: str) -> list[Violation]:
    by_invariant: dict[str, list[Violation]] = {}
    for name, figures in dict.fromkeys(found):
        by_invariant.setdefault(name, []).append(Violation(name, node, fault, figures))
    return [violation for violations in by_invariant.values() for violation in violations[:MAX_REPORTED]]
