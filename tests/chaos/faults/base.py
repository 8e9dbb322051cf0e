"""The description of a fault: how it is injected, what the node promises, and which test shows it.

Each kind has a file (`processes.py`, `links.py`, ...) with a tuple `FAULTS`. A fault only injects. `invariants/` checks
the promise and does not know how the fault was injected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tests.chaos.fault_context import FaultContext
from tests.chaos.swarm import SwarmNode

RECOVERY_S = 300.0  # a busy machine starts a node slowly


class Ends(Enum):
    """The effect of a fault on the node's daemon."""

    CONTINUES = "continues"  # the same process runs before and after
    RESTARTS = "restarts"  # it ends during `inject` or soon after; the harness starts it again
    REFUSES = "refuses"  # it does not start until the damage is undone, see `FaultContext.expect_refusal`


def _nothing_missing() -> str:
    return ""


def _any_node(_: SwarmNode) -> bool:
    return True


def trains(node: SwarmNode) -> bool:
    """Return whether the node has a learner and fetches foreign groups."""
    return node.role != "generator"


def generates(node: SwarmNode) -> bool:
    """Return whether the node has a generation worker."""
    return node.role != "learner"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    `inject` affects `context.node` and returns when the fault is over. It registers cleanup with `context.undo`.
    `missing` returns what the machine lacks for the fault, or "". `fits` returns whether a node can have the fault.
    """

    name: str
    kind: str  # processes, links, members, files, clock
    promise: str  # the promise of the node, for the table
    shown_by: str  # the test that shows it, path::name
    inject: Callable[[FaultContext], None]
    ends: Ends = Ends.CONTINUES
    recovers_within_s: float = RECOVERY_S
    missing: Callable[[], str] = _nothing_missing
    fits: Callable[[SwarmNode], bool] = _any_node
