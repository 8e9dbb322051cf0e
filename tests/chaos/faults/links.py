"""Faults of links: cut, flapping and slow connections, made by the proxies of the nodes (`proxy.py`)."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tests.chaos.faults.base import Fault, FaultContext
from tests.chaos.swarm import SwarmNode

SHORTEST_CUT_S, LONGEST_CUT_S = 3.0, 25.0
SLOW_S = (0.05, 1.0)
SLOW_FOR_S = 10.0
NUM_FLAPS = 6
RECONNECTS_WITHIN_S = 300.0  # a busy machine


@contextmanager
def _cut(node: SwarmNode, others: Iterable[SwarmNode]) -> Iterator[None]:
    """Cut the links between the node and some others, in both directions, while the block runs."""
    ends = [(node.proxy, other.proxy) for other in others]
    for one, other in (*ends, *(end[::-1] for end in ends)):
        one.cut(other.host)
    try:
        yield
    finally:
        for one, other in (*ends, *(end[::-1] for end in ends)):
            one.restore(other.host)


def isolate(context: FaultContext) -> None:
    """Cut all links of the node."""
    cut_s = context.rng.uniform(SHORTEST_CUT_S, LONGEST_CUT_S)
    context.notes.append(f"for {cut_s:.0f} s")
    with _cut(context.node, [*context.swarm.neighbors(context.node), context.swarm.bootstrap]):
        time.sleep(cut_s)
    _wait_for_peers(context)


def cut_one_link(context: FaultContext) -> None:
    """Cut the link between the node and one other node."""
    other = context.rng.choice(context.swarm.neighbors(context.node))
    cut_s = context.rng.uniform(SHORTEST_CUT_S, LONGEST_CUT_S)
    context.notes.append(f"to {other.name} for {cut_s:.0f} s")
    with _cut(context.node, [other]):
        time.sleep(cut_s)


def flap(context: FaultContext) -> None:
    """Break all connections of the node repeatedly."""
    for _ in range(NUM_FLAPS):
        with _cut(context.node, [*context.swarm.neighbors(context.node), context.swarm.bootstrap]):
            time.sleep(context.rng.uniform(0.1, 1.0))
        time.sleep(context.rng.uniform(0.1, 1.0))
    _wait_for_peers(context)


def slow_down(context: FaultContext) -> None:
    """Delay the connections to the node in both directions."""
    delay_s = context.rng.uniform(*SLOW_S)
    context.notes.append(f"{delay_s * 1000:.0f} ms each way for {SLOW_FOR_S:.0f} s")
    context.node.proxy.delay_s = delay_s
    try:
        time.sleep(SLOW_FOR_S)
    finally:
        context.node.proxy.delay_s = 0.0


def _wait_for_peers(context: FaultContext) -> None:
    found = context.node.wait_for(
        lambda: context.node.status("swarm", "peers_connected"), timeout_s=RECONNECTS_WITHIN_S
    )
    assert found, f"no peer in {RECONNECTS_WITHIN_S:.0f} s"


FAULTS = (
    Fault("links", "isolate",
          "It trains on own groups. Afterwards it finds its peers and fetches the groups that it missed.", isolate),
    Fault("links", "cut-link", "Both nodes get each other's groups through other nodes.", cut_one_link),
    Fault("links", "flap", "Repeatedly broken connections lose no groups and leak no descriptors.", flap),
    Fault("links", "slow-link", "A slow link delays foreign groups, but not the node.", slow_down),
)  # fmt: skip
