"""Which shards the loop subscribes to where the budget allows one alone, before and after a peer is trusted."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ftis_node.node.loops.shards import LOOK_S, ShardsLoop
from ftis_node.node.state import NodeState
from ftis_node.swarm.topology.shards import shard_of
from tests.loop_clock import LoopClock

if TYPE_CHECKING:
    from collections.abc import Set

    import pytest

NUM_SHARDS = 8
OWN = "this node"
PEER = next(name for name in map(str, range(100)) if shard_of(name, NUM_SHARDS) != shard_of(OWN, NUM_SHARDS))


class Subscriptions:
    """What the loop subscribed to last; a swarm without other members."""

    shards: Set[int] = frozenset()

    async def read_shards(self, shards: Set[int]) -> None:
        self.shards = shards

    async def members(self) -> list[str]:
        return []


def _parts(subscriptions: Subscriptions, trusted: set[str]) -> Any:
    return SimpleNamespace(
        manifest=SimpleNamespace(wire=SimpleNamespace(announcement_shards=NUM_SHARDS)),
        settings=SimpleNamespace(swarm=SimpleNamespace(announcements_per_s=1.0)),
        identity=SimpleNamespace(peer_id=OWN),
        registry=SimpleNamespace(peers={PEER: SimpleNamespace(record=None)}),
        state=NodeState(),
        peers=SimpleNamespace(is_trusted=trusted.__contains__),
        events=SimpleNamespace(write=lambda *_, **__: None),
        gossip=subscriptions,
    )


async def test_the_shard_of_a_trusted_peer_is_read_whatever_the_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: Counter[int] = Counter()
    pull: Any = SimpleNamespace(ear=SimpleNamespace(heard_in_shard=heard), follow=lambda _: None)
    subscriptions, trusted = Subscriptions(), set[str]()
    clock = LoopClock(monkeypatch)
    task = asyncio.create_task(ShardsLoop(_parts(subscriptions, trusted), pull).run())
    await clock.passes(0.0)
    assert len(subscriptions.shards) == NUM_SHARDS

    async def look() -> None:
        heard[0] += 10**9
        await clock.passes(LOOK_S)

    await look()
    assert subscriptions.shards == {shard_of(OWN, NUM_SHARDS)}
    trusted.add(PEER)
    await look()
    assert subscriptions.shards == {shard_of(OWN, NUM_SHARDS), shard_of(PEER, NUM_SHARDS)}
    await look()
    assert subscriptions.shards == {shard_of(OWN, NUM_SHARDS), shard_of(PEER, NUM_SHARDS)}
    task.cancel()
