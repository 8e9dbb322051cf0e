"""Upload and request budgets over real p2pds: excess requests get BUSY or are closed, other peers are served."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from ftis_node.gossip import FetchOutcome, GossipLimits
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.gossip.wire_format import Frame, RpcService, pack_ids, protocol, write_frame
from ftis_node.records.identity import Identity
from tests.gossip.helpers import BodyStore, announce_until_received, settings
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio


async def _until_probed(node: Libp2pGossip, server: Libp2pGossip) -> None:
    """Wait until the node has the server's answer to its probe. A later probe would count as a request."""
    await eventually(lambda: server.peer_id in node._membership.members)


@asynccontextmanager
async def swarm(folder: Path, limits: GossipLimits, *, num_others: int = 1) -> AsyncIterator[list[Libp2pGossip]]:
    """Yield a node that serves within `limits`, and others connected to it."""
    server = Libp2pGossip(settings(folder / "s"), identity=Identity.generate(), run_id="r", limits=limits)
    nodes = [server]
    try:
        await server.start()
        for number in range(num_others):
            peers = tuple(server.addresses)
            node = Libp2pGossip(settings(folder / str(number), peers=peers), identity=Identity.generate(), run_id="r")
            nodes.append(node)
            await node.start()
            await announce_until_received(node, [server], b"hello")
            await _until_probed(node, server)
        yield nodes
    finally:
        await asyncio.gather(*(node.close() for node in nodes))


async def test_requests_above_the_rate_are_answered_busy_and_counted(tmp_path: Path) -> None:
    store = BodyStore(b"body")
    async with swarm(tmp_path, GossipLimits(max_requests_per_minute=20), num_others=2) as (server, flooder, other):
        server.serve(store.lookup)
        began_at = time.monotonic()
        outcomes = [(await flooder.fetch(server.peer_id, store.ids)).outcome for _ in range(25)]
        num_busy, num_refilled = outcomes.count(FetchOutcome.BUSY), int((time.monotonic() - began_at) * 20 / 60)
        assert 5 - num_refilled <= num_busy <= 5
        assert server.counters.serve_errors.get("over_requests", 0) == num_busy
        assert (await other.fetch(server.peer_id, store.ids)).outcome is FetchOutcome.COMPLETE
        assert await flooder.confirm(server.peer_id, store.ids)


async def test_bytes_above_the_budget_are_refused_and_received_bodies_kept(tmp_path: Path) -> None:
    small, large = (BodyStore(*(os.urandom(size) for _ in range(4))) for size in (50_000, 300_000))
    async with swarm(tmp_path, GossipLimits(max_upload_bytes_per_s=100_000)) as (server, other):
        server.serve(small.lookup)
        started = time.monotonic()
        assert (await other.fetch(server.peer_id, small.ids)).outcome is FetchOutcome.COMPLETE
        assert time.monotonic() - started > 0.8  # the bytes of one second at once, the rest at the rate
        await asyncio.sleep(1)  # until the budget has refilled
        server.serve(large.lookup)
        fetched = await other.fetch(server.peer_id, large.ids)
        assert (fetched.outcome, len(fetched.bodies)) == (FetchOutcome.BUSY, 1)
        assert server.counters.serve_errors == {"over_bytes": 1}


async def test_refused_peers_are_not_served_and_others_are(tmp_path: Path) -> None:
    store = BodyStore(b"body")
    async with swarm(tmp_path, GossipLimits(), num_others=2) as (server, banned, other):
        server.serve(store.lookup, is_refused=lambda peer_id: peer_id == banned.peer_id)
        fetched = await banned.fetch(server.peer_id, store.ids)
        assert fetched.outcome is FetchOutcome.BROKEN
        assert not fetched.bodies
        assert not await banned.confirm(server.peer_id, store.ids)
        assert server.counters.serve_errors["refused"] == 2
        assert (await other.fetch(server.peer_id, store.ids)).bodies == (b"body",)


async def test_a_stream_read_at_one_byte_per_second_is_closed_and_takes_little_memory(tmp_path: Path) -> None:
    body_bytes = 1 << 20
    store = BodyStore(*(os.urandom(body_bytes) for _ in range(48)))
    limits = GossipLimits(idle_timeout_s=1.0, fetch_timeout_s=20.0, max_request_bytes=64 << 20)
    async with swarm(tmp_path, limits) as (server, slow):
        server.serve(store.lookup)
        session: Any = slow._supervisor.session
        fetch = protocol("r", RpcService.FETCH)
        before = psutil.Process().memory_info().rss
        async with session.client.stream(server.peer_id, fetch, timeout_s=30) as (reader, writer):
            request = pack_ids(store.ids, limits=limits)
            await write_frame(writer, Frame.REQUEST, request, idle_s=1)
            reading = asyncio.create_task(_read_slowly(reader))
            await eventually(lambda: server.counters.serve_errors.get("timed_out"), within_s=25)
            grown = psutil.Process().memory_info().rss - before
            reading.cancel()
        assert server.counters.bodies_out < len(store.ids)
        assert grown < 16 << 20
        assert (await slow.fetch(server.peer_id, store.ids[:2])).outcome is FetchOutcome.COMPLETE


async def test_silent_streams_of_one_peer_leave_slots_for_others(tmp_path: Path) -> None:
    store = BodyStore(b"body")
    limits = GossipLimits(max_streams=8, max_streams_per_peer=1, idle_timeout_s=5)
    async with swarm(tmp_path, limits, num_others=2) as (server, flooder, other):
        server.serve(store.lookup)
        session: Any = flooder._supervisor.session
        fetch = protocol("r", RpcService.FETCH)
        streams = [session.client.stream(server.peer_id, fetch, timeout_s=30) for _ in range(12)]
        for stream in streams:
            await stream.__aenter__()
        await eventually(lambda: server.counters.serve_errors.get("flood", 0) == 8)
        assert (await other.fetch(server.peer_id, store.ids)).outcome is FetchOutcome.COMPLETE
        for stream in streams:
            await stream.__aexit__(None, None, None)


async def _read_slowly(reader: asyncio.StreamReader) -> None:
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    while True:
        await asyncio.sleep(1)
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        await reader.read(1)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
