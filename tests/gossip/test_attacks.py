"""Attacks of a member over the network: each one is counted and leaves the victim at work."""

import asyncio
import time

import pytest
import pytest_asyncio

from ftis_node.gossip import GossipLimits
from ftis_node.gossip.directory.entries import EntryKind, sign_entry
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.gossip.p2pd.hivemind_bindings import DHTID, PeerID
from ftis_node.gossip.wire_format import RpcService, protocol, record_key
from ftis_node.records.identity import Identity
from tests.gossip.helpers import BodyStore, announce_until_received, settings
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = GossipLimits(idle_timeout_s=0.5, max_streams=4, max_streams_per_peer=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory):
    """Yield a victim and an attacker, connected members of one run."""
    folder = tmp_path_factory.mktemp("g")
    victim = Libp2pGossip(settings(folder / "v"), identity=Identity.generate(), run_id="r", limits=LIMITS)
    await victim.start()
    attacker = Libp2pGossip(
        settings(folder / "a", peers=tuple(victim.addresses)), identity=Identity.generate(), run_id="r"
    )
    await attacker.start()
    await announce_until_received(attacker, [victim], b"hello")
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
async def test_invalid_bytes_on_a_stream_are_counted(pair, sent, reason):
    victim, attacker = pair
    victim.serve(BodyStore(b"body").lookup)
    num_before = victim.counters.serve_errors.get(reason, 0)
    assert attacker._supervisor.session is not None
    fetch = protocol("r", RpcService.FETCH)
    async with attacker._supervisor.session.client.stream(victim.peer_id, fetch, timeout_s=30) as (reader, writer):
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), 10) == b""
    await eventually(lambda: victim.counters.serve_errors.get(reason, 0) == num_before + 1)


async def test_a_record_cannot_be_overwritten_by_another_peer(pair):
    victim, attacker = pair
    assert await victim.publish_record(b"authentic", ttl_s=60)
    assert attacker._supervisor.session is not None
    node = attacker._supervisor.session.directory._node
    key, expires_at = record_key("r", victim.peer_id), time.time() + 300
    forged = sign_entry(Identity.generate(), EntryKind.RECORD, "r", b"forged", expires_at=expires_at)
    for value in (b"plain", forged, bytes(3 << 20)):
        await node.store(key, value, expires_at)
        assert await victim.get_record(victim.peer_id) == b"authentic"
        assert await attacker.get_record(victim.peer_id) == b"authentic"


async def test_neighbors_in_the_directory_stay_in_the_routing_table(pair):
    for node, other in (pair, pair[::-1]):
        assert node._supervisor.session is not None
        table = node._supervisor.session.directory._node.protocol.routing_table
        await eventually(lambda table=table, other=other: PeerID.from_base58(other.peer_id) in table)
    num_updates = 0

    def count_update(*args):
        nonlocal num_updates
        num_updates += 1

    table.add_or_update_node, original = count_update, table.add_or_update_node
    await asyncio.sleep(0.5)
    table.add_or_update_node = original
    assert num_updates < 10  # each loss of a neighbor would cause more updates


async def test_a_stale_copy_does_not_hide_a_newer_record(pair):
    owner, reader = pair
    assert owner._supervisor.session is not None
    assert reader._supervisor.session is not None
    key = DHTID.generate(source=record_key("r", owner.peer_id))
    storages = [node._supervisor.session.directory._node.protocol.storage for node in pair if node._supervisor.session]
    assert await owner.publish_record(b"old", ttl_s=60)
    old = storages[1].get(key)
    assert await owner.publish_record(b"new", ttl_s=90)
    del storages[1][key]
    assert storages[1].store(key, old.value, old.expiration_time)
    assert await reader.get_record(owner.peer_id) == b"new"
