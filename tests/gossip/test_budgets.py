"""Upload and request budgets over real p2pds: excessive requests get BUSY or are cut, other peers are served."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from ftis_node.gossip import FetchOutcome, GossipLimits
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.gossip.wire_format import Frame, RpcService, pack_ids, protocol, write_frame
from ftis_node.records.identity import Identity
from tests.gossip.helpers import Shelf, announce_until_heard, settings
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio


async def _until_probed(node: Libp2pGossip, server: Libp2pGossip) -> None:
    """Wait until the node has its answer about batches: the server counts a later probe, too."""
    await eventually(lambda: server.peer_id in node._membership._batches.members)


@asynccontextmanager
async def swarm(folder: Path, limits: GossipLimits, *, num_others: int = 1) -> AsyncIterator[list[Libp2pGossip]]:
    """A node that serves within `limits`, and others connected to it."""
    server = Libp2pGossip(settings(folder / "s"), identity=Identity.generate(), run_id="r", limits=limits)
    nodes = [server]
    try:
        await server.start()
        for number in range(num_others):
            peers = tuple(server.addresses)
            node = Libp2pGossip(settings(folder / str(number), peers=peers), identity=Identity.generate(), run_id="r")
            nodes.append(node)
            await node.start()
            await announce_until_heard(node, [server], b"hello")
            await _until_probed(node, server)
        yield nodes
    finally:
        await asyncio.gather(*(node.close() for node in nodes))


async def test_requests_without_end_are_told_busy_and_counted(tmp_path: Path) -> None:
    shelf = Shelf(b"body")
    async with swarm(tmp_path, GossipLimits(max_requests_per_minute=20), num_others=2) as (server, flooder, other):
        server.serve(shelf.lookup)
        began_at = time.monotonic()
        outcomes = [(await flooder.fetch(server.peer_id, shelf.ids)).outcome for _ in range(25)]
        num_busy, come_back = outcomes.count(FetchOutcome.BUSY), int((time.monotonic() - began_at) * 20 / 60)
        assert 5 - come_back <= num_busy <= 5
        assert server.counters.serve_errors.get("over_requests", 0) == num_busy
        assert (await other.fetch(server.peer_id, shelf.ids)).outcome is FetchOutcome.COMPLETE
        assert await flooder.confirm(server.peer_id, shelf.ids)


async def test_bytes_above_the_budget_are_refused_and_what_came_is_kept(tmp_path: Path) -> None:
    small, large = Shelf(*(os.urandom(50_000) for _ in range(4))), Shelf(*(os.urandom(300_000) for _ in range(4)))
    async with swarm(tmp_path, GossipLimits(max_upload_bytes_per_s=100_000)) as (server, other):
        server.serve(small.lookup)
        started = time.monotonic()
        assert (await other.fetch(server.peer_id, small.ids)).outcome is FetchOutcome.COMPLETE
        assert time.monotonic() - started > 0.8  # a second's worth at once, the rest at its pace
        await asyncio.sleep(1)
        server.serve(large.lookup)
        fetched = await other.fetch(server.peer_id, large.ids)
        assert (fetched.outcome, len(fetched.bodies)) == (FetchOutcome.BUSY, 1)
        assert server.counters.serve_errors == {"over_bytes": 1}


async def test_refused_peers_get_nothing_and_others_do(tmp_path: Path) -> None:
    shelf = Shelf(b"body")
    async with swarm(tmp_path, GossipLimits(), num_others=2) as (server, banned, other):
        server.serve(shelf.lookup, is_refused=lambda peer_id: peer_id == banned.peer_id)
        fetched = await banned.fetch(server.peer_id, shelf.ids)
        assert fetched.outcome is FetchOutcome.BROKEN
        assert not fetched.bodies
        assert not await banned.confirm(server.peer_id, shelf.ids)
        assert server.counters.serve_errors["refused"] == 2
        assert (await other.fetch(server.peer_id, shelf.ids)).bodies == (b"body",)


async def test_a_peer_that_reads_a_byte_a_second_is_cut_and_costs_little_memory(tmp_path: Path) -> None:
    body_bytes = 1 << 20
    shelf = Shelf(*(os.urandom(body_bytes) for _ in range(48)))
    limits = GossipLimits(idle_timeout_s=1.0, fetch_timeout_s=20.0, max_request_bytes=64 << 20)
    async with swarm(tmp_path, limits) as (server, slow):
        server.serve(shelf.lookup)
        session: Any = slow._supervisor.session
        fetch = protocol("r", RpcService.FETCH)
        before = psutil.Process().memory_info().rss
        async with session.client.stream(server.peer_id, fetch, timeout_s=30) as (reader, writer):
            request = pack_ids(shelf.ids, limits=limits)
            await write_frame(writer, Frame.REQUEST, request, idle_s=1)
            reading = asyncio.create_task(_read_slowly(reader))
            await eventually(lambda: server.counters.serve_errors.get("timed_out"), within_s=25)
            grown = psutil.Process().memory_info().rss - before
            reading.cancel()
        assert server.counters.bodies_out < len(shelf.ids)
        assert grown < 16 << 20
        assert (await slow.fetch(server.peer_id, shelf.ids[:2])).outcome is FetchOutcome.COMPLETE


async def test_one_peers_silent_streams_leave_the_doorway_to_others(tmp_path: Path) -> None:
    shelf = Shelf(b"body")
    limits = GossipLimits(max_streams=8, max_streams_per_peer=1, idle_timeout_s=5)
    async with swarm(tmp_path, limits, num_others=2) as (server, flooder, other):
        server.serve(shelf.lookup)
        session: Any = flooder._supervisor.session
        fetch = protocol("r", RpcService.FETCH)
        streams = [session.client.stream(server.peer_id, fetch, timeout_s=30) for _ in range(12)]
        for stream in streams:
            await stream.__aenter__()
        await eventually(lambda: server.counters.serve_errors.get("flood", 0) == 8)
        assert (await other.fetch(server.peer_id, shelf.ids)).outcome is FetchOutcome.COMPLETE
        for stream in streams:
            await stream.__aexit__(None, None, None)


async def _read_slowly(reader: asyncio.StreamReader) -> None:
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    while True:
        await asyncio.sleep(1)
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        await reader.read(1)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
