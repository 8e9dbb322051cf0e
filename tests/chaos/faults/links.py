"""Faults of links: cut, flapping and slow connections, made by the proxies of the nodes (`proxy.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.chaos.fault_context import FaultContext
from tests.chaos.faults.base import Fault

SHORTEST_CUT_S, LONGEST_CUT_S = 3.0, 25.0
SLOW_S = (0.05, 1.0)
SLOW_FOR_S = 10.0
NUM_FLAPS = 6
RECONNECTS_WITHIN_S = 300.0  # a busy machine
SHOWN_BY = "tests/chaos/test_chaos.py::test_a_swarm_recovers_from_one_fault_of_each_kind"


def isolate(context: FaultContext) -> None:
    """Cut all links of the node."""
    cut_s = context.rng.uniform(SHORTEST_CUT_S, LONGEST_CUT_S)
    context.note(f"for {cut_s:.0f} s")
    others = [*context.swarm.neighbors(context.node), context.swarm.bootstrap]
    for other in others:
        other.proxy.cut(context.node.proxy.host)
    context.node.proxy.cut()
    try:
        time.sleep(cut_s)
    finally:
        context.node.proxy.restore()
        for other in others:
            other.proxy.restore(context.node.proxy.host)
    _wait_for_peers(context)


def cut_one_link(context: FaultContext) -> None:
    """Cut the link between the node and one other node."""
    other = context.rng.choice(context.swarm.neighbors(context.node))
    cut_s = context.rng.uniform(SHORTEST_CUT_S, LONGEST_CUT_S)
    context.note(f"to {other.name} for {cut_s:.0f} s")
    context.node.proxy.cut(other.proxy.host)
    other.proxy.cut(context.node.proxy.host)
    try:
        time.sleep(cut_s)
    finally:
        context.node.proxy.restore(other.proxy.host)
        other.proxy.restore(context.node.proxy.host)


def flap(context: FaultContext) -> None:
    """Break all connections of the node repeatedly."""
    for _ in range(NUM_FLAPS):
        for node in context.swarm.nodes:
            node.proxy.cut(context.node.proxy.host)
        context.node.proxy.cut()
        time.sleep(context.rng.uniform(0.1, 1.0))
        for node in context.swarm.nodes:
            node.proxy.restore(context.node.proxy.host)
        context.node.proxy.restore()
        time.sleep(context.rng.uniform(0.1, 1.0))
    _wait_for_peers(context)


def slow_down(context: FaultContext) -> None:
    """Delay the connections to the node in both directions."""
    delay_s = context.rng.uniform(*SLOW_S)
    context.note(f"{delay_s * 1000:.0f} ms each way for {SLOW_FOR_S:.0f} s")
    context.node.proxy.delay(delay_s)
    try:
        time.sleep(SLOW_FOR_S)
    finally:
        context.node.proxy.delay(0.0)


def _wait_for_peers(context: FaultContext) -> None:
    def has_peers() -> bool:
        status = context.node.status()
        return status is not None and status["swarm"]["peers_connected"] > 0

    assert context.node.wait_for(has_peers, timeout_s=RECONNECTS_WITHIN_S), f"no peer in {RECONNECTS_WITHIN_S:.0f} s"


def _fault(name: str, promise: str, inject: Callable[[FaultContext], None]) -> Fault:
    return Fault(name=name, kind="links", promise=promise, shown_by=SHOWN_BY, inject=inject)


FAULTS = (
    _fault("isolate", "It trains on own groups. Afterwards it finds its peers and fetches the groups that it missed.",
           isolate),
    _fault("cut-link", "Both nodes get each other's groups through other nodes.", cut_one_link),
    _fault("flap", "Repeatedly broken connections lose no groups and leak no descriptors.", flap),
    _fault("slow-link", "A slow link delays foreign groups, but not the node.", slow_down),
)  # fmt: skip
