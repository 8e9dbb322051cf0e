"""All faults, the selection that this machine and swarm allow, and the schedule of a seed.

Faults come in shuffled rounds. Each round contains every fault once, so that a short run covers all kinds too. A node
has two faults in a row only if no other node fits.
"""

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from tests.chaos.faults import clock, files, links, members, power, processes
from tests.chaos.faults.base import Fault
from tests.chaos.swarm import Swarm

ALL_FAULTS: tuple[Fault, ...] = (
    *(*processes.FAULTS, *links.FAULTS, *members.FAULTS),
    *(*files.FAULTS, *clock.FAULTS, *power.FAULTS),
)
NUM_SEEDS = 1 << 32
KINDS = tuple(dict.fromkeys(fault.kind for fault in ALL_FAULTS))


def chosen(words: Collection[str]) -> dict[str, Fault]:
    """Return the faults of these kinds or names, by name; all if empty. Raises ValueError for an unknown word."""
    by_name = {fault.name: fault for fault in ALL_FAULTS}
    if unknown := set(words) - by_name.keys() - set(KINDS):
        raise ValueError(f"{', '.join(sorted(unknown))}: no such fault; choose from {', '.join((*KINDS, *by_name))}")
    return {name: fault for name, fault in by_name.items() if not words or {name, fault.kind} & set(words)}


def fitting(faults: Mapping[str, Fault], swarm: Swarm) -> Mapping[str, Sequence[str]]:
    return {name: [node.name for node in swarm.nodes if fault.fits(node)] for name, fault in faults.items()}


def table() -> str:
    rows = [f"| `{one.name}` | {one.kind} | {one.ends.value} | {one.promise} |" for one in ALL_FAULTS]
    return "\n".join(["| fault | kind | the daemon then | promise of the node |", "|---|---|---|---|", *rows])


@dataclass(frozen=True, slots=True)
class Planned:
    """One scheduled fault: the names of fault and node, and the seed of the fault's random choices."""

    number: int
    fault: str
    node: str
    seed: int


def rounds(fitting: Mapping[str, Sequence[str]], *, seed: int) -> Iterator[Planned]:
    """Yield faults without end. `fitting` maps a fault to the names of the nodes that it can affect.

    A fault without a node is left out. Raises ValueError if no fault remains.
    """
    possible = {fault: sorted(nodes) for fault, nodes in sorted(fitting.items()) if nodes}
    if not possible:
        raise ValueError("no fault is possible here")
    rng, number, last = random.Random(seed), 0, ""
    while True:
        for fault in rng.sample(list(possible), len(possible)):
            number += 1
            last = rng.choice([node for node in possible[fault] if node != last] or possible[fault])
            yield Planned(number, fault, last, rng.randrange(NUM_SEEDS))


def first_by_node(count: int, fitting: Mapping[str, Sequence[str]], *, seed: int) -> dict[str, list[Planned]]:
    faults: dict[str, list[Planned]] = {}
    for one in islice(rounds(fitting, seed=seed), count):
        faults.setdefault(one.node, []).append(one)
    return faults
