"""Which shards the loop subscribes to where the budget allows one alone, before and after a peer is trusted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ftis_node.config.manifest import parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.node.loops.backfill import SHARDS_INTERVAL_S
from ftis_node.node.startup.wiring import Wiring
from ftis_node.records.identity import Identity
from ftis_node.swarm.topology import shard_of
from tests.loop_clock import LoopClock
from tests.node.nodes import ME, components
from tests.node.support import manifest_text

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NUM_SHARDS = 8
OWN_SHARD = shard_of(ME.peer_id, NUM_SHARDS)
NAMES = (Identity.from_seed(bytes([seed]) * 32).peer_id for seed in range(20, 60))
PEER = next(name for name in NAMES if shard_of(name, NUM_SHARDS) != OWN_SHARD)


async def test_the_shard_of_a_trusted_peer_is_read_whatever_the_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = manifest_text(foreign_wait_s=1) + f"[wire]\nannouncement_shards = {NUM_SHARDS}\n"
    settings = NodeSettings(model="m", swarm={"announcements_per_s": 1.0})
    with components(tmp_path, settings=settings, manifest=parse_manifest(text, source="test")) as node:
        node.registry.seen(PEER)
        wiring, clock = Wiring(node), LoopClock(monkeypatch)
        heard = wiring.announcements.announcements_by_shard
        await node.gossip.start()
        task = asyncio.create_task(wiring.shards_loop().run())
        await clock.passes(0.0)
        assert len(node.context.state.read_shards) == NUM_SHARDS

        async def look() -> None:
            heard[0] += 10**9
            await clock.passes(SHARDS_INTERVAL_S)

        await look()
        assert node.context.state.read_shards == {OWN_SHARD}
        node.peers.trust(PEER)
        await look()
        assert node.context.state.read_shards == {OWN_SHARD, shard_of(PEER, NUM_SHARDS)}
        await look()
        assert node.context.state.read_shards == {OWN_SHARD, shard_of(PEER, NUM_SHARDS)}
        task.cancel()
        await node.gossip.close()
