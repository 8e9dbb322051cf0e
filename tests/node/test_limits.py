"""A real node keeps its limits: a full home pauses it, free space resumes it, and it keeps the download rate."""

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.node.loops import pull
from ftis_node.node.storage.disk_space import HomeLimit, HomeUse
from tests.gossip.helpers import settings as network
from tests.node.light_swarm import LightSwarm, held, identity_of, manifest_of
from tests.waiting import eventually

RATE = 40_000
BURST_S = 2.0


async def test_pulls_of_groups_that_are_announced_with_one_byte_keep_the_download_rate(tmp_path, monkeypatch):
    """Two nodes over p2pd. At any time, the received bytes are at most burst, rate times time, and one pull."""
    swarm = LightSwarm(tmp_path, manifest_of())
    limits = {"max_download_bytes_per_s": RATE, "pulls_in_flight": 1}
    monkeypatch.setattr(pull, "PULL_BATCH", 1)
    async with AsyncExitStack() as stack:

        async def start(number, peers=(), **limits):
            gossip = Libp2pGossip(
                network(tmp_path / f"p2pd-{number}", peers=peers),
                identity=identity_of(number),
                run_id=swarm.manifest.run_id,
            )
            node = swarm.node(number, gossip=gossip, directory_period_s=1, **limits)
            return await stack.enter_async_context(node), gossip

        sender_node, sender = await start(1)
        receiver_node, receiver = await start(2, tuple(sender.addresses), **limits)
        await eventually(receiver.members)
        _announce_one_byte(monkeypatch)
        space = receiver_node.parts.store.space
        space.limit = HomeLimit(1000, reserve_bytes=100)
        space.note(HomeUse(1000, free_bytes=10_000))  # full, so that all groups wait to be pulled
        await swarm.publish(sender_node, 6, num_tokens=300)
        max_group_bytes, num_received, began = 30_000, 0, time.monotonic()
        space.note(HomeUse(0, free_bytes=10_000))
        while num_received < 5 * 28_800:
            num_received = receiver.counters.envelope_bytes_in
            assert num_received <= RATE * (BURST_S + time.monotonic() - began) + max_group_bytes
            assert time.monotonic() - began < 60, "the groups did not arrive"
            await asyncio.sleep(0.02)
        await eventually(lambda: receiver_node.parts.context.counters.groups_received >= 5)


def _announce_one_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    from ftis_node.node.loops import publish
    from ftis_node.node.peers import group_requests

    announce, honest = publish.announce_group, group_requests.Announcement
    monkeypatch.setattr(publish, "announce_group", lambda *given, envelope_bytes: announce(*given, envelope_bytes=1))
    monkeypatch.setattr(group_requests, "Announcement", lambda **fields: honest(**fields | {"envelope_bytes": 1}))


async def test_a_full_home_pulls_nothing_until_there_is_space(tmp_path):
    swarm = LightSwarm(tmp_path, manifest_of())
    async with swarm.node(1) as sender_node, swarm.node(2) as receiver_node:
        space = receiver_node.parts.store.space
        space.limit = HomeLimit(1000, reserve_bytes=100)
        space.note(HomeUse(950, free_bytes=10_000))
        assert space.why_full
        await swarm.publish(sender_node, 3)
        await asyncio.sleep(0.3)
        assert receiver_node.gossip.counters.envelopes_in == 0
        space.note(HomeUse(100, free_bytes=10_000))
        await eventually(lambda: held(receiver_node) == 3)
