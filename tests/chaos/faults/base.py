"""What a fault is: what is done to a node, what the node promises then, and which test shows it.

The faults of one kind are a file (`processes.py`, `links.py`, ...) with a tuple `FAULTS`. A fault only does
harm; whether the promise was kept is for `invariants/` to say, which knows nothing of how the harm was done.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.scene import Scene
    from tests.chaos.swarm import SwarmNode

RECOVERY_S = 300.0  # generous: a busy machine takes long to start a node


class Ends(Enum):
    """How the fault ends for the node's daemon."""

    GOES_ON = "goes on"  # it lives through it: the same process before and after
    RESTARTS = "starts again"  # it is gone when `inject` returns or soon after; the harness starts it again
    REFUSES = "refuses"  # it will not start until healed: `Scene.expect_refusal` says with which code and words


def _nothing_missing() -> str:
    return ""


def _any_node(_: SwarmNode) -> bool:
    return True


def trains(node: SwarmNode) -> bool:
    """Whether it has a learner, and takes the groups of others."""
    return node.role != "generator"


def generates(node: SwarmNode) -> bool:
    """Whether it has a generation worker."""
    return node.role != "learner"


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of harm.

    `inject` does it to `scene.node` and returns when it is done (a stop of 30 s takes 30 s); what must be taken back
    afterwards it gives to `scene.undo`. `missing` says what this machine lacks for it, "" where nothing; `fits` says to
    which nodes it can be done at all.
    """

    name: str
    kind: str  # processes, links, members, files, clock
    promise: str  # one sentence: what the node promises
    shown_by: str  # the test that shows it, path::name
    inject: Callable[[Scene], None]
    ends: Ends = Ends.GOES_ON
    recovers_within_s: float = RECOVERY_S
    missing: Callable[[], str] = _nothing_missing
    fits: Callable[[SwarmNode], bool] = _any_node
