"""The shards that the loop subscribes to if the budget allows one shard: by trust and by the pull policy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from ftis_node.config.manifest import parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.node.loops import shards
from ftis_node.node.loops.shards import SHARDS_INTERVAL_S
from ftis_node.node.wiring import Wiring
from ftis_node.records.identity import Identity
from ftis_node.swarm import demand
from ftis_node.swarm.topology import shard_of
from tests.loop_clock import LoopClock
from tests.node.nodes import ME, components
from tests.node.support import manifest_text

NUM_SHARDS = 8
OWN_SHARD = shard_of(ME.peer_id, NUM_SHARDS)
NAMES = (Identity.from_seed(bytes([seed]) * 32).peer_id for seed in range(20, 60))
PEER = next(name for name in NAMES if shard_of(name, NUM_SHARDS) != OWN_SHARD)


@asynccontextmanager
async def one_shard_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **swarm: Any
) -> AsyncIterator[tuple[Any, Any]]:
    """Yield a node whose budget allows one shard, and a function that simulates a flood of announcements."""
    text = manifest_text(foreign_wait_s=1) + f"[wire]\nannouncement_shards = {NUM_SHARDS}\n"
    settings = NodeSettings(model="m", swarm=swarm)
    monkeypatch.setattr(shards, "ANNOUNCEMENTS_PER_S", 1.0)
    with components(tmp_path, settings=settings, manifest=parse_manifest(text, source="test")) as node:
        node.peers.registry.seen(PEER)
        wiring, clock = Wiring(node), LoopClock(monkeypatch)
        await node.gossip.start()
        task = asyncio.create_task(wiring.shards_loop.run())
        await clock.advance(0.0)
        assert len(node.context.state.read_shards) == NUM_SHARDS

        async def flood() -> None:
            wiring.announcements.announcements_by_shard[0] += 10**9
            await clock.advance(SHARDS_INTERVAL_S)

        yield node, flood
        task.cancel()
        await node.gossip.close()


async def test_the_shard_of_a_trusted_peer_is_read_at_any_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with one_shard_node(tmp_path, monkeypatch, pull_policy="needed") as (node, flood):
        await flood()
        assert node.context.state.read_shards == {OWN_SHARD}
        node.peers.trust(PEER)
        await flood()
        assert node.context.state.read_shards == {OWN_SHARD, shard_of(PEER, NUM_SHARDS)}
        await flood()
        assert node.context.state.read_shards == {OWN_SHARD, shard_of(PEER, NUM_SHARDS)}


@pytest.mark.parametrize("pull_policy", ["auto", "all"])
async def test_a_node_that_pulls_every_group_reads_every_shard_at_any_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pull_policy: str
) -> None:
    async with one_shard_node(tmp_path, monkeypatch, pull_policy=pull_policy) as (node, flood):
        await flood()
        assert len(node.context.state.read_shards) == NUM_SHARDS


async def test_a_node_of_a_large_swarm_keeps_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "SMALL_SWARM", 0)
    async with one_shard_node(tmp_path, monkeypatch) as (node, flood):
        monkeypatch.setattr(node.gossip, "known_members", AsyncMock(return_value=[PEER]))
        await flood()
        assert node.context.state.read_shards == {OWN_SHARD}
