"""Which fault, on which node, with which dice: pure, and the same for the same seed.

Faults come in rounds. In a round every fault comes once, so that all kinds come round however short a run is cut, and
the rounds are shuffled apart. No node is the victim twice in a row where another would do, so that all nodes have
about as much to bear; each node's faults are done one after another, all nodes' side by side.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

DICE = 1 << 32


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault of the schedule, by its names. `dice` seeds whatever the fault itself draws."""

    number: int
    fault: str
    node: str
    dice: int


def rounds(fitting: Mapping[str, Sequence[str]], *, seed: int) -> Iterator[Planned]:
    """Faults without end. `fitting`: the names of the nodes that a fault can be done to, by the fault's name.

    A fault that fits no node is left out. Raises ValueError where none is left.
    """
    possible = {fault: sorted(nodes) for fault, nodes in sorted(fitting.items()) if nodes}
    if not possible:
        raise ValueError("no fault can be done here")
    rng, number, last = random.Random(seed), 0, ""
    while True:
        for fault in rng.sample(list(possible), len(possible)):
            number += 1
            last = rng.choice([node for node in possible[fault] if node != last] or possible[fault])
            yield Planned(number, fault, last, rng.randrange(DICE))


def first(count: int, fitting: Mapping[str, Sequence[str]], *, seed: int) -> list[Planned]:
    """The first `count` faults of the schedule of `seed`."""
    return list(islice(rounds(fitting, seed=seed), count))


def lanes(planned: Sequence[Planned]) -> dict[str, list[Planned]]:
    """Each node's faults, in their order."""
    by_node: dict[str, list[Planned]] = {}
    for one in planned:
        by_node.setdefault(one.node, []).append(one)
    return by_node
