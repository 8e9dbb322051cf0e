"""Links that are cut, that flap, and that are slow: by the lines that stand before the nodes (`line.py`)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.chaos.faults.base import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.scene import Scene

SHORTEST_CUT_S, LONGEST_CUT_S = 3.0, 25.0
SLOW_S = (0.05, 1.0)
SLOW_FOR_S = 10.0
NUM_FLAPS = 6
JOINS_AGAIN_S = 120.0
SHOWN_BY = "tests/chaos/test_chaos.py::test_a_swarm_outlives_one_fault_of_each_sort"


def cut_off(scene: Scene) -> None:
    """The node is alone: nobody reaches it, and it reaches nobody."""
    cut_s = scene.rng.uniform(SHORTEST_CUT_S, LONGEST_CUT_S)
    scene.note(f"for {cut_s:.0f} s")
    everybody = [*scene.swarm.neighbors(scene.node), scene.swarm.meeting_point]
    for other in everybody:
        other.line.cut(scene.node.line.host)
    scene.node.line.cut()
    try:
        time.sleep(cut_s)
    finally:
        scene.node.line.mend()
        for other in everybody:
            other.line.mend(scene.node.line.host)
    _until_it_has_peers(scene)


def cut_one_link(scene: Scene) -> None:
    """The node and one other cannot reach each other; both reach everybody else."""
    other, cut_s = (
        scene.rng.choice(scene.swarm.neighbors(scene.node)),
        scene.rng.uniform(SHORTEST_CUT_S, LONGEST_CUT_S),
    )
    scene.note(f"to {other.name} for {cut_s:.0f} s")
    scene.node.line.cut(other.line.host)
    other.line.cut(scene.node.line.host)
    try:
        time.sleep(cut_s)
    finally:
        scene.node.line.mend(other.line.host)
        other.line.mend(scene.node.line.host)


def flap(scene: Scene) -> None:
    """All of its connections break again and again."""
    for _ in range(NUM_FLAPS):
        for node in scene.swarm.nodes:
            node.line.cut(scene.node.line.host)
        scene.node.line.cut()
        time.sleep(scene.rng.uniform(0.1, 1.0))
        for node in scene.swarm.nodes:
            node.line.mend(scene.node.line.host)
        scene.node.line.mend()
        time.sleep(scene.rng.uniform(0.1, 1.0))
    _until_it_has_peers(scene)


def slow_down(scene: Scene) -> None:
    """What is sent to it and what it answers there comes late."""
    delay_s = scene.rng.uniform(*SLOW_S)
    scene.note(f"{delay_s * 1000:.0f} ms each way for {SLOW_FOR_S:.0f} s")
    scene.node.line.delay(delay_s)
    try:
        time.sleep(SLOW_FOR_S)
    finally:
        scene.node.line.delay(0.0)


def _until_it_has_peers(scene: Scene) -> None:
    def has_peers() -> bool:
        status = scene.node.status()
        return status is not None and status["swarm"]["peers_connected"] > 0

    assert scene.node.wait_for(has_peers, timeout_s=JOINS_AGAIN_S), f"no peer in {JOINS_AGAIN_S:.0f} s"


def _fault(name: str, promise: str, inject: Callable[[Scene], None]) -> Fault:
    return Fault(name=name, kind="links", promise=promise, shown_by=SHOWN_BY, inject=inject)


FAULTS = (
    _fault("cut-off", "Alone it trains on its own groups; as soon as it can it finds its peers and fetches "
           "what it missed.", cut_off),
    _fault("cut-link", "Two that cannot reach each other have each other's groups from the others.", cut_one_link),
    _fault("flap", "Connections that break again and again cost neither groups nor descriptors.", flap),
    _fault("slow-link", "A slow line makes foreign groups late, not the node.", slow_down),
)  # fmt: skip
