"""The in-memory implementation: delay and loss by hooks, and repeatable runs."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from ftis_node.gossip import FetchOutcome, GossipLimits, SwarmPhase
from ftis_node.gossip.loopback import LoopbackGossip, LoopbackSwarm
from tests.gossip.helpers import Shelf, hear

if TYPE_CHECKING:
    from collections.abc import Sequence


async def _nodes(swarm: LoopbackSwarm, *names: str, limits: GossipLimits | None = None) -> list[LoopbackGossip]:
    nodes = [swarm.join(name, run_id="r", limits=limits) for name in names]
    for node in nodes:
        await node.start()
    return nodes


async def test_announcements_and_bodies_take_their_time() -> None:
    swarm = LoopbackSwarm(delay_s=lambda sender, receiver: 0.5 if receiver == "far" else 0.0)
    sender, near, far = await _nodes(swarm, "sender", "near", "far")
    shelf = Shelf(b"body")
    sender.serve(shelf.lookup)
    began = asyncio.get_running_loop().time()
    await sender.announce(b"news")
    await hear(near, b"news")
    assert far.counters.announcements_received == 0, "it is on its way"
    await hear(far, b"news")
    assert asyncio.get_running_loop().time() - began >= 0.49
    assert (await far.fetch("sender", shelf.ids, timeout_s=0.1)).outcome is FetchOutcome.TIMED_OUT
    assert (await near.fetch("sender", shelf.ids)).bodies == (b"body",)


async def test_a_node_that_closes_while_a_request_is_on_its_way_serves_nothing() -> None:
    swarm = LoopbackSwarm(delay_s=lambda sender, receiver: 0.1 if receiver == "closing" else 0.0)
    closing, other = await _nodes(swarm, "closing", "other")
    shelf = Shelf(b"body")
    closing.serve(shelf.lookup)
    fetching = asyncio.create_task(other.fetch("closing", shelf.ids))
    await asyncio.sleep(0)
    await closing.close()
    assert (await fetching).outcome is FetchOutcome.UNREACHABLE
    assert closing.counters.bodies_out == 0


async def test_what_is_lost_is_lost() -> None:
    swarm = LoopbackSwarm(loses=lambda sender, receiver, payload: receiver == "deaf")
    sender, deaf, other = await _nodes(swarm, "sender", "deaf", "other")
    await sender.announce(b"news")
    await hear(other, b"news")
    assert deaf.counters.announcements_received == 0
    assert (await sender.fetch("deaf", [bytes(32)])).outcome is FetchOutcome.UNREACHABLE
    assert (await deaf.fetch("sender", [bytes(32)])).outcome is FetchOutcome.COMPLETE


async def test_a_seeded_loss_repeats_itself() -> None:
    async def heard() -> list[bytes]:
        rng = random.Random(7)
        swarm = LoopbackSwarm(loses=lambda *_: rng.random() < 0.5)
        sender, receiver = await _nodes(swarm, "sender", "receiver")
        for number in range(50):
            await sender.announce(bytes([number]))
        await receiver.close()
        return [announcement.payload async for announcement in receiver.announcements()]

    first = await heard()
    assert 10 < len(first) < 40
    assert first == await heard()


async def test_an_idle_server_is_given_up_before_the_whole_time_is_over() -> None:
    async def slow(ids: Sequence[bytes]) -> list[bytes]:
        await asyncio.sleep(5)
        return []

    server, client = await _nodes(LoopbackSwarm(), "server", "client", limits=GossipLimits(idle_timeout_s=0.1))
    server.serve(slow)
    async with asyncio.timeout(30):
        assert (await client.fetch("server", [bytes(32)], timeout_s=60)).outcome is FetchOutcome.TIMED_OUT


async def test_a_node_that_left_is_gone() -> None:
    first, second = await _nodes(LoopbackSwarm(), "first", "second")
    assert first.state.state is SwarmPhase.CONNECTED
    await second.close()
    assert first.state.state is SwarmPhase.STANDALONE
    assert second.state.state is SwarmPhase.STARTING
    assert not await second.announce(b"nobody hears this")
    assert await first.members() == second.addresses == []
    assert (await first.fetch("second", [bytes(32)])).outcome is FetchOutcome.UNREACHABLE


def test_a_run_id_must_fit_into_names() -> None:
    with pytest.raises(ValueError, match="is not a run id"):
        LoopbackSwarm().join("peer", run_id="a/b")
