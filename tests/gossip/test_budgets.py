"""Upload and request budgets, and the in-memory network: excess requests get BUSY or are closed, others are served."""

import asyncio
import os

import psutil
import pytest

from ftis_node.gossip import FetchOutcome, GossipLimits
from ftis_node.gossip.frames import Frame, write_frame
from ftis_node.gossip.loopback import LoopbackGossip, LoopbackSwarm
from ftis_node.gossip.names import RpcService, protocol
from tests.gossip.helpers import BodyStore, announce_until_received, receive
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio


async def _in_memory(swarm: LoopbackSwarm, *names: str, limits: GossipLimits | None = None) -> list[LoopbackGossip]:
    """Return connected nodes in memory, with the same admission control as over libp2p."""
    nodes = [swarm.join(name, run_id="r", limits=limits) for name in names]
    for node in nodes:
        await node.start()
    return nodes


async def test_requests_above_the_rate_are_answered_busy_and_counted():
    store, limits = BodyStore(b"body"), GossipLimits(max_requests_per_minute=20)
    server, flooder, other = await _in_memory(LoopbackSwarm(), "server", "flooder", "other", limits=limits)
    server.serve(store.lookup)
    outcomes = [(await flooder.fetch(server.peer_id, store.ids)).outcome for _ in range(25)]
    assert outcomes.count(FetchOutcome.BUSY) == server.counters.serve_errors["over_requests"] == 5
    assert (await other.fetch(server.peer_id, store.ids)).outcome is FetchOutcome.COMPLETE
    assert await flooder.confirm(server.peer_id, store.ids)


async def test_bytes_above_the_budget_are_refused_and_received_bodies_kept():
    limits = GossipLimits(max_upload_bytes_per_s=100_000)
    server, other = await _in_memory(LoopbackSwarm(), "server", "other", limits=limits)
    store = BodyStore(*(os.urandom(300_000) for _ in range(4)))
    server.serve(store.lookup)
    fetched = await other.fetch(server.peer_id, store.ids)
    assert (fetched.outcome, len(fetched.items)) == (FetchOutcome.BUSY, 1)
    assert server.counters.serve_errors == {"over_bytes": 1}


async def test_a_stream_read_at_one_byte_per_second_is_closed_and_takes_little_memory(start):
    body_bytes = 1 << 20
    store = BodyStore(*(os.urandom(body_bytes) for _ in range(48)))
    limits = GossipLimits(idle_timeout_s=1.0, fetch_timeout_s=20.0, max_request_bytes=64 << 20)
    server = await start(limits=limits)
    slow = await start(peers=tuple(server.addresses))
    await announce_until_received(slow, [server], b"hello")
    server.serve(store.lookup)
    fetch = protocol("r", RpcService.FETCH)
    before = psutil.Process().memory_info().rss
    async with slow._session.client.stream(server.peer_id, fetch, timeout_s=30) as (reader, writer):
        await write_frame(writer, Frame.REQUEST, b"".join(store.ids), idle_s=1)
        reading = asyncio.create_task(_read_slowly(reader))
        await eventually(lambda: server.counters.serve_errors.get("timed_out"), within_s=25)
        grown = psutil.Process().memory_info().rss - before
        reading.cancel()
    assert server.counters.envelopes_out < len(store.ids)
    assert grown < 16 << 20
    assert (await slow.fetch(server.peer_id, store.ids[:2])).outcome is FetchOutcome.COMPLETE


async def _read_slowly(reader: asyncio.StreamReader) -> None:
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    while True:
        await asyncio.sleep(1)
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        await reader.read(1)
        reader._transport.pause_reading()  # type: ignore[attr-defined]


async def test_a_node_that_closes_while_a_request_is_on_its_way_serves_nothing():
    closing, other = await _in_memory(LoopbackSwarm(), "closing", "other")
    store = BodyStore(b"body")
    closing.serve(store.lookup)
    fetching = asyncio.create_task(other.fetch("closing", store.ids))
    await asyncio.sleep(0)
    await closing.close()
    assert (await fetching).outcome is FetchOutcome.UNREACHABLE
    assert closing.counters.envelopes_out == 0


async def test_lost_announcements_and_requests_do_not_arrive():
    swarm = LoopbackSwarm(loses=lambda sender, receiver, payload: receiver == "lossy")
    sender, lossy, other = await _in_memory(swarm, "sender", "lossy", "other")
    await sender.announce(b"news")
    await receive(other, b"news")
    assert lossy.counters.announcements_received == 0
    assert (await sender.fetch("lossy", [bytes(32)])).outcome is FetchOutcome.UNREACHABLE
    assert (await lossy.fetch("sender", [bytes(32)])).outcome is FetchOutcome.COMPLETE
