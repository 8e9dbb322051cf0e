"""A fault: how it is injected, what the node promises, and the context in which it runs.

Each kind has a file (`processes.py`, `links.py`, ...) with a tuple `FAULTS`. A fault only injects. `invariants/` checks
the promise and does not know how the fault was injected.
"""

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from tests.chaos.swarm import Swarm, SwarmNode


class Ends(Enum):
    """The effect of a fault on the node's daemon."""

    CONTINUES = "continues"  # the same process runs before and after
    RESTARTS = "restarts"  # it ends during `inject` or soon after; the harness starts it again
    REFUSES = "refuses"  # it does not start until the damage is undone, see `FaultContext.refusal`


class Refusal(NamedTuple):
    """How a node must refuse to start: its exit code, and a part of its last log line."""

    exit_code: int
    text: str


@dataclass
class FaultContext:
    """The context of one fault. `node` is the affected node, `notes` are details for the report.

    `undoing` has what undoes the fault. It runs after the fault or the refusal, before the node recovers.
    """

    swarm: Swarm
    node: SwarmNode
    rng: random.Random
    notes: list[str] = field(default_factory=list)
    refusal: Refusal | None = None  # expected at the next start
    undoing: ExitStack = field(default_factory=ExitStack)


def trains(node: SwarmNode) -> bool:
    return node.role != "generator"


def generates(node: SwarmNode) -> bool:
    return node.role != "learner"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `inject` affects `context.node` and returns when the fault is over.

    `fits` returns whether a node can have the fault on this machine.
    """

    kind: str  # processes, links, members, files, clock, power
    name: str
    promise: str
    inject: Callable[[FaultContext], None]
    ends: Ends = Ends.CONTINUES
    fits: Callable[[SwarmNode], bool] = lambda _: True
