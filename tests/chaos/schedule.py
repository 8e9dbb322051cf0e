"""The schedule: which fault, on which node, with which seed. It is pure, and equal for equal seeds.

Faults come in shuffled rounds. Each round contains every fault once, so that a short run covers all kinds too. A node
has two faults in a row only if no other node fits.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

NUM_SEEDS = 1 << 32


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
