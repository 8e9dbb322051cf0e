"""What must hold after each fault and at the end of a run, as functions from observations to violations.

    before = snapshot(node)
    ...                                           # the fault, and the node's recovery
    found = check(before, snapshot(node), fault)  # what holds no more
    ...
    found = check_end(swarm)                      # over the whole run; stopped nodes are looked at as such

Two kinds. Those of a state hold of what is seen at one moment, with all that the trail remembers: `check` tells those
that did not hold before. Those of a change compare two moments. The functions know nothing of how a fault was done; a
violation names the invariant, the node, the fault and the figures.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from tests.chaos.invariants import groups, leftovers, status, steps
from tests.chaos.observing.observe import SETTLE_S, watch_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.chaos.faults.base import Fault
    from tests.chaos.observing.observe import Observation
    from tests.chaos.observing.processes import Watched
    from tests.chaos.swarm import Swarm

MOST_TOLD = 5  # of one invariant at one look: where one group is lost, all may be
ALL_NODES = "all"  # in the place of a node's name, where an invariant is over all of them
WARM_STEPS = 5  # a node's memory has its usual size after so many steps

AT_ONE_MOMENT: dict[str, Callable[[Observation], Iterator[str]]] = {
    "no group is lost": groups.lost_groups,
    "every own number is accounted for": groups.lost_numbers,
    "a group is in one state": groups.states,
    "the buffer is sound": groups.unsound,
    "no group is used twice": groups.used_twice,
    "trail and buffer agree on what a step used": groups.used_otherwise,
    "no group is stuck in a step": groups.stuck,
    "a group is admitted once": groups.admitted_twice,
    "what was given up stays so": groups.used_after_release,
    "what is admitted is noted": groups.not_noted,
    "steps are in order": steps.steps_in_order,
    "no step is missing": steps.no_gap,
    "served versions rise": steps.versions_served,
    "published versions rise": steps.versions_published,
    "groups claim versions that were made": steps.versions_claimed,
    "the trail can be read": steps.trail_parses,
    "one peer id over all lives": steps.one_peer_id,
    "no process outlives its time": leftovers.strays,
    "no zombies": leftovers.zombies,
    "one process of a role": leftovers.doubles,
    "no file is left": leftovers.leftovers,
    "the status is truthful": status.untruths,
}
FROM_ONE_TO_ANOTHER: dict[str, Callable[[Observation, Observation], Iterator[str]]] = {
    "steps never go back below a checkpoint": steps.back_below_checkpoint,
    "memory, descriptors and threads are back": leftovers.grown,
    "restarts are counted": status.restarts_not_counted,
}
PASSING = (  # what a node may be given a moment to put right
    *(steps.trail_parses, leftovers.strays, leftovers.zombies, leftovers.doubles, leftovers.leftovers),
    status.untruths,
)


@dataclass(frozen=True, slots=True)
class Violation:
    """What did not hold, of which node, after which fault ("" at the end of a run), with the figures."""

    invariant: str
    node: str
    fault: str
    figures: str

    def __str__(self) -> str:
        when = f"after {self.fault}" if self.fault else "at the end"
        return f"{self.invariant}: node {self.node}, {when}: {self.figures}"


def table() -> str:
    """The table of tests/chaos/README.md."""
    judges = [*AT_ONE_MOMENT.items(), *FROM_ONE_TO_ANOTHER.items()]
    rows = [f"| {name} | {inspect.cleandoc(judge.__doc__ or '').splitlines()[0]} |" for name, judge in judges]
    return "\n".join(["| what must hold | in other words |", "|---|---|", *rows])


class Broken(NamedTuple):
    """An invariant and how it is broken."""

    invariant: str
    figures: str


def snapshot(node: Watched, *, settle_s: float = SETTLE_S) -> Observation:
    """The node now, given `settle_s` for whatever passes by itself."""
    return watch_of(node).look(unsettled=unsettled, settle_s=settle_s)


def last_seen(node: Watched) -> Observation | None:
    """The last look at the node, None before the first."""
    return watch_of(node).last


def unsettled(seen: Observation) -> list[str]:
    """What is wrong now and may pass in a moment."""
    return [figures for judge in PASSING for figures in judge(seen)]


def broken(seen: Observation) -> list[Broken]:
    """What does not hold at this moment."""
    return [Broken(name, figures) for name, judge in AT_ONE_MOMENT.items() for figures in judge(seen)]


def check(before: Observation, after: Observation, fault: Fault | None) -> list[Violation]:
    """What holds no more after `fault`, or does not hold between the two; at most so many of each invariant."""
    known = set(broken(before))
    found = [wrong for wrong in broken(after) if wrong not in known]
    for name, judge in FROM_ONE_TO_ANOTHER.items():
        found += [Broken(name, figures) for figures in judge(before, after)]
    return _violations(found, node=after.node, fault=fault.name if fault else "")


def check_end(swarm: Swarm) -> list[Violation]:
    """Over the whole run, of every node that was ever looked at: call it with the nodes running, or stopped.

    What was told after a fault is told again where it still does not hold.
    """
    found: list[Violation] = []
    last = [(watch_of(node), snapshot(node)) for node in (*swarm.nodes, swarm.meeting_point)]
    for watch, seen in last:
        found += _violations(broken(seen), node=seen.node, fault="")
        found += [replace(wrong, figures=f"over the run {wrong.figures}") for wrong in _grown(watch.seen)]
    twice = [Broken("one group a number", figures) for figures in groups.two_of_a_number(seen for _, seen in last)]
    return found + _violations(twice, node=ALL_NODES, fault="")


def _grown(seen: Sequence[Observation]) -> list[Violation]:
    """Growth from the first look at a warm node to the last."""
    warm = [one for one in seen if one.is_running and one.floor_step >= WARM_STEPS]
    if len(warm) < 2:
        return []
    name = "memory, descriptors and threads are back"
    found = [Broken(name, figures) for figures in leftovers.grown(warm[0], warm[-1])]
    return _violations(found, node=warm[0].node, fault="")


def _violations(found: Sequence[Broken], *, node: str, fault: str) -> list[Violation]:
    told: dict[str, list[Violation]] = {}
    for wrong in dict.fromkeys(found):
        told.setdefault(wrong.invariant, []).append(Violation(wrong.invariant, node, fault, wrong.figures))
    return [violation for violations in told.values() for violation in violations[:MOST_TOLD]]
