"""The invariants after each fault and at the end of a run, as functions from observations to violations.

An invariant of a state takes one observation with all events. An invariant of a change compares two observations. None
depends on the fault. A violation names the invariant, the node, the fault and the figures.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tests.chaos.invariants import groups, nodes
from tests.chaos.observation.watch import SETTLE_S, Observation, watch_of
from tests.chaos.swarm import Swarm, SwarmNode

MAX_REPORTED = 5  # violations of one invariant in one observation: a fault that loses one group may lose all
ALL_NODES = "all"  # instead of a node's name, for an invariant over all nodes
WARM_STEPS = 5  # after so many steps the memory of a node has its usual size
GROWTH = "memory, descriptors and threads do not grow"

OF_A_STATE: dict[str, Callable[[Observation], Iterator[str]]] = {
    "no group is lost": groups.lost_groups, "no own number is missing": groups.missing_numbers,
    "a group is in one state": groups.invalid_states, "the buffer is intact": groups.integrity_errors,
    "no group is used twice": groups.used_twice,
    "event log and buffer agree on the groups of a step": groups.step_differences,
    "no group is stuck in a step": groups.stuck, "a group is admitted once": groups.admitted_twice,
    "a released group is not used": groups.used_after_release, "admitted groups are logged": groups.not_logged,
    "steps are in order": nodes.steps_out_of_order, "no step is missing": nodes.missing_steps,
    "served versions rise": nodes.falling_served_versions, "published versions rise": nodes.wrong_published_versions,
    "own groups claim existing versions": nodes.overclaimed_versions,
    "the event log is readable": nodes.unreadable_events, "the peer id does not change": nodes.peer_id_changes,
    "no orphan process": nodes.orphans, "no zombie process": nodes.zombies, "one process per role": nodes.duplicates,
    "no leftover file": nodes.leftover_files, "the status is correct": nodes.errors_of_status,
}  # fmt: skip
OF_A_CHANGE: dict[str, Callable[[Observation, Observation], Iterator[str]]] = {
    "no step before a checkpoint is repeated": nodes.repeated_before_checkpoint, GROWTH: nodes.growth,
    "restarts are counted": nodes.restarts_not_counted, "bans are kept": nodes.lost_bans,
}  # fmt: skip
OVER_ALL_NODES: dict[str, Callable[[Sequence[Observation]], Iterator[str]]] = {
    "one group per number": groups.shared_numbers,
    "no acknowledged group is lost": groups.lost_acknowledged,
}
TRANSIENT = (  # a node has a moment to correct these
    *(nodes.unreadable_events, nodes.orphans, nodes.zombies, nodes.duplicates, nodes.leftover_files),
    nodes.errors_of_status,
)


class Violation(NamedTuple):
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
    invariants: list[tuple[str, Any]] = [*OF_A_STATE.items(), *OF_A_CHANGE.items(), *OVER_ALL_NODES.items()]
    rows = [f"| {name} | {inspect.cleandoc(violated.__doc__ or '').splitlines()[0]} |" for name, violated in invariants]
    return "\n".join(["| invariant | meaning |", "|---|---|", *rows])


def snapshot(node: SwarmNode, *, settle_s: float = SETTLE_S) -> Observation:
    """Observe the node; wait up to `settle_s` until transient problems are gone."""

    def unsettled(seen: Observation) -> list[str]:
        return [figures for violated in TRANSIENT for figures in violated(seen)]

    return watch_of(node).observe(unsettled=unsettled, settle_s=settle_s)


def findings(seen: Observation) -> list[tuple[str, str]]:
    """Return the violated invariants of a state with their figures."""
    return [(name, figures) for name, violated in OF_A_STATE.items() for figures in violated(seen)]


def check(before: Observation, after: Observation, fault: str) -> list[Violation]:
    """Return the violations that are new after `fault`, at most `MAX_REPORTED` of each invariant."""
    known = set(findings(before))
    found = [finding for finding in findings(after) if finding not in known]
    for name, violated in OF_A_CHANGE.items():
        found += [(name, figures) for figures in violated(before, after)]
    return _violations(found, node=after.node, fault=fault)


def check_end(swarm: Swarm) -> list[Violation]:
    """Return the violations over the whole run, after which all nodes are stopped.

    A violation that was reported after a fault is reported again if it still exists.
    """
    last = [(watch_of(node), snapshot(node)) for node in (*swarm.nodes, swarm.bootstrap)]
    found: list[Violation] = []
    for watch, seen in last:
        found += _violations([*findings(seen), *growth_over(watch.seen)], node=seen.node)
    members = [seen for _, seen in last]
    over_all = [(name, figures) for name, violated in OVER_ALL_NODES.items() for figures in violated(members)]
    return found + _violations(over_all, node=ALL_NODES)


def growth_over(seen: Sequence[Observation]) -> list[tuple[str, str]]:
    """Compare the first observation of a warm node with the last."""
    warm = [one for one in seen if one.is_running and one.floor_step >= WARM_STEPS]
    return [(GROWTH, f"over the run {figures}") for figures in nodes.growth(warm[0], warm[-1])] if warm else []


def _violations(found: Iterable[tuple[str, str]], *, node: str, fault: str = "") -> list[Violation]:
    num_reported: Counter[str] = Counter()
    violations = []
    for name, figures in dict.fromkeys(found):
        num_reported[name] += 1
        if num_reported[name] <= MAX_REPORTED:
            violations.append(Violation(name, node, fault, figures))
    return violations
