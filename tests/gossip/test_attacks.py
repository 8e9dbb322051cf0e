"""What a member may try against another over the network, and what comes of it: a counter."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from ftis_node.gossip import GossipLimits
from ftis_node.gossip.bindings import PeerID
from ftis_node.gossip.entries import EntryKind, seal
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.gossip.names import Service, protocol, record_key, topic
from ftis_node.records.identity import Identity
from tests.gossip.helpers import Shelf, announce_until_heard, eventually, settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = GossipLimits(idle_timeout_s=1.0, max_streams=4, max_streams_per_peer=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Libp2pGossip, Libp2pGossip]]:
    """A victim and an attacker, both members of the run, connected."""
    folder = tmp_path_factory.mktemp("g")
    victim = Libp2pGossip(settings(folder / "v"), identity=Identity.generate(), run_id="r", limits=LIMITS)
    await victim.start()
    attacker = Libp2pGossip(
        settings(folder / "a", peers=tuple(victim.addresses)), identity=Identity.generate(), run_id="r"
    )
    await attacker.start()
    await announce_until_heard(attacker, [victim], b"hello")
    yield victim, attacker
    await asyncio.gather(attacker.close(), victim.close())


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"\x01\xff\xff\xff\xff", "frame_size"),
        (b"\x09\0\0\0\0", "frame_kind"),
        (b"\x02\0\0\0\0", "frame_kind"),
        (b"\x01\0\0\0\x05short", "ids"),
        (b"\x01\0\0\0\0", "ids"),
        (b"GET / HTTP/1.1\r\n", "frame_kind"),
        (b"\x01", "timed_out"),
        (b"", "timed_out"),
    ],
)
async def test_rubbish_on_a_stream_is_counted(
    pair: tuple[Libp2pGossip, Libp2pGossip], sent: bytes, reason: str
) -> None:
    victim, attacker = pair
    victim.serve(Shelf(b"body").lookup)
    num_before = victim.counters.serve_errors.get(reason, 0)
    assert attacker._link.session is not None
    fetch = protocol("r", Service.FETCH)
    async with attacker._link.session.control.stream(victim.peer_id, fetch, timeout_s=5) as (reader, writer):
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), 10) == b""
    await eventually(lambda: victim.counters.serve_errors.get(reason, 0) == num_before + 1)


async def test_many_open_streams_are_cut_and_others_served_again(pair: tuple[Libp2pGossip, Libp2pGossip]) -> None:
    victim, attacker = pair
    shelf = Shelf(b"body")
    victim.serve(shelf.lookup)
    assert attacker._link.session is not None
    control = attacker._link.session.control

    async def hold() -> bytes:
        async with control.stream(victim.peer_id, protocol("r", Service.FETCH), timeout_s=10) as (reader, _):
            return await reader.read()

    await asyncio.gather(*(hold() for _ in range(24)))
    assert victim.counters.serve_errors["flood"] > 0
    assert victim.counters.serve_errors["busy"] > 0
    fetched = await attacker.fetch(victim.peer_id, shelf.ids)
    assert fetched.bodies == (b"body",)


async def test_an_oversize_announcement_is_counted_not_delivered(pair: tuple[Libp2pGossip, Libp2pGossip]) -> None:
    victim, attacker = pair
    num_received = victim.counters.announcements_received
    assert attacker._link.session is not None
    await attacker._link.session.control.publish(topic("r", 0), bytes(1025))
    await eventually(lambda: victim.counters.announcements_refused == 1)
    assert victim.counters.announcements_received == num_received


async def test_a_record_cannot_be_overwritten_by_another(pair: tuple[Libp2pGossip, Libp2pGossip]) -> None:
    victim, attacker = pair
    assert await victim.publish_record(b"mine", ttl_s=60)
    assert attacker._link.session is not None
    node = attacker._link.session.directory._node
    key, expires_at = record_key("r", victim.peer_id), time.time() + 300
    forged = seal(Identity.generate(), EntryKind.RECORD, "r", b"forged", expires_at=expires_at)
    for value in (b"plain", forged, bytes(3 << 20)):
        await node.store(key, value, expires_at)
        assert await victim.get_record(victim.peer_id) == b"mine"
        assert await attacker.get_record(victim.peer_id) == b"mine"


async def test_a_huge_directory_request_harms_nobody(pair: tuple[Libp2pGossip, Libp2pGossip]) -> None:
    victim, attacker = pair
    assert attacker._link.session is not None
    node = attacker._link.session.directory._node
    assert await node.protocol.call_find(PeerID.from_base58(victim.peer_id), [node.node_id] * 50_000) is None
    assert victim.process_id is not None
    assert victim.counters.restarts == 0
    assert await victim.publish_record(b"still here", ttl_s=60)
