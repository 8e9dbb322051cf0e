"""Attacks of a member, and values that could end a node: each one is counted and leaves the victim at work."""

import asyncio
import logging
import os
import time

import pytest
import pytest_asyncio

from ftis_node.gossip import GossipLimits, SwarmPhase
from ftis_node.gossip.directory.entries import EntryKind, pack_member, sign_entry
from ftis_node.gossip.libp2p import Libp2pGossip
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.gossip.membership import MemberProbe
from ftis_node.gossip.names import RpcService, bucket_key, protocol, record_key, topic
from ftis_node.gossip.p2pd import client
from ftis_node.gossip.p2pd.hivemind_bindings import DHTID, PeerID
from ftis_node.gossip.types import DUPLICATE_IDENTITY
from ftis_node.records.identity import Identity
from ftis_node.swarm.peer_guard import PeerGuard, Place
from ftis_node.swarm.topology import bucket_of
from tests.gossip.helpers import BodyStore, announce_until_received, settings
from tests.waiting import eventually

RUN = "r"
INVALID_ADDRESSES = [
    "/dns4/a_b.invalid/tcp/4001", "/ip6/fe80::1%eth0/tcp/4001", "/dns4/a..b/tcp/1", "/ip4/1.2.3.4/tcp/" + "0" * 40, "/",
]  # fmt: skip
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory):
    """Yield a victim with a short poll interval, and a connected member."""
    folder, nodes = tmp_path_factory.mktemp("g"), []
    for name in ("v", "m"):
        node = Libp2pGossip(
            settings(folder / name, peers=tuple(nodes[0].addresses) if nodes else (), check_s=1.0, dial_timeout_s=2.0),
            identity=Identity.generate(),
            run_id=RUN,
            limits=GossipLimits(max_announcement_bytes=512, idle_timeout_s=0.5) if name == "v" else None,
        )
        await node.start()
        nodes.append(node)
    await announce_until_received(nodes[1], [nodes[0]], b"hello")
    yield nodes
    await asyncio.gather(*(node.close() for node in nodes))


async def _register(node: Libp2pGossip, identity: Identity, addresses: list[str]) -> None:
    """Store a member's entry in the directory, signed by `identity`."""
    dht, expires_at = node._supervisor.session.directory._node, time.time() + 60
    entry = sign_entry(identity, EntryKind.MEMBER, RUN, pack_member(addresses, num_shards=1), expires_at=expires_at)
    key = bucket_key(RUN, bucket_of(identity.peer_id))
    assert await dht.store(key, entry, expires_at, subkey=identity.peer_id)


async def _knows(node: Libp2pGossip, peer_id: str) -> bool:
    return peer_id in await node.known_members()


async def test_invalid_addresses_in_the_directory_end_no_node(pair, tmp_path):
    victim, member = pair
    identities = [Identity.generate() for _ in range(3)]
    for number, identity in enumerate(identities):
        addresses = INVALID_ADDRESSES[number:] + INVALID_ADDRESSES[:number]
        await _register(member, identity, [f"{address}/p2p/{identity.peer_id}" for address in addresses])
    for identity in identities:
        await eventually(lambda identity=identity: _knows(victim, identity.peer_id))
    newcomer = Libp2pGossip(
        settings(tmp_path / "n", peers=tuple(member.addresses), dial_timeout_s=2.0),
        identity=Identity.generate(),
        run_id=RUN,
    )
    await newcomer.start()
    await eventually(lambda: _knows(newcomer, identities[0].peer_id))
    await announce_until_received(newcomer, [victim, member], os.urandom(8))
    assert [node.counters.restarts for node in (victim, member, newcomer)] == [0, 0, 0]
    assert [sum(node.guard.num_faults.values()) for node in (victim, member, newcomer)] == [0, 0, 0]
    await newcomer.close()


async def test_an_oversize_announcement_is_counted_and_its_sender_reported(pair):
    victim, member = pair
    refusals: list[tuple[str, str]] = []

    def on_refusal(peer_id, error):
        refusals.append((peer_id, error.reason))

    victim.serve(BodyStore().lookup, on_refusal=on_refusal)
    before = victim.counters.announcements_refused
    for num_bytes in (513, 1024, 60_000):
        await member._supervisor.session.client.publish(topic(RUN, 0), bytes(num_bytes))
    await eventually(lambda: victim.counters.announcements_refused == before + 3)
    assert refusals == [(member.peer_id, "size")] * 3
    await announce_until_received(member, [victim], os.urandom(512))


async def test_two_nodes_with_one_identity_both_report_it(pair, tmp_path, caplog):
    identity, peers = Identity.generate(), tuple(pair[0].addresses)
    before, *copies = [
        Libp2pGossip(settings(tmp_path / name, peers=peers, check_s=0.1), identity=identity, run_id=RUN)
        for name in ("before", "original", "copy")
    ]
    for node in (before, copies[0]):  # a node that is restarted is no second node
        await node.start()
        await eventually(lambda node=node: node.state.state is SwarmPhase.CONNECTED)
        await asyncio.sleep(0.5)  # several rounds alone
        assert DUPLICATE_IDENTITY not in node.state.reason
        if node is before:
            await node.close()
    with caplog.at_level(logging.WARNING):
        await copies[1].start()
        for node in copies:
            await eventually(lambda node=node: DUPLICATE_IDENTITY in node.state.reason)
        await asyncio.sleep(0.3)
    warnings = [record for record in caplog.records if DUPLICATE_IDENTITY in record.getMessage()]
    assert len(warnings) == 2, "one warning of each node"
    assert identity.peer_id in warnings[0].getMessage()
    assert DUPLICATE_IDENTITY not in pair[0].state.reason
    await asyncio.gather(*(node.close() for node in copies))


async def test_two_loopback_nodes_with_one_identity_report_it():
    swarm = LoopbackSwarm()
    original, copy, other = (swarm.join(name, run_id=RUN) for name in ("a", "a", "b"))
    for node in (original, copy, other):
        await node.start()
    assert [DUPLICATE_IDENTITY in node.state.reason for node in (original, copy, other)] == [True, True, False]
    await original.close()
    assert await other.members() == ["a"]


async def test_an_unexpected_error_of_a_hello_ends_no_loop():
    guard, queried = PeerGuard(), []

    async def query(peer_id):
        queried.append(peer_id)
        if peer_id == "failing":
            raise KeyError("an unexpected error")
        return True

    probe = MemberProbe(query, guard=guard)
    for _ in range(3):
        async with asyncio.TaskGroup() as group:
            probe.update(["failing", "valid"], group)
    assert probe.members == ["valid"]
    assert queried.count("failing") == 1, "the peer is paused after a fault"
    assert guard.num_faults == {Place.HELLO: 1}

    async def disconnected(peer_id):
        raise EOFError("p2pd is gone")

    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.TaskGroup() as group:
            MemberProbe(disconnected, guard=guard).update(["valid"], group)
    assert isinstance(raised.value.exceptions[0], EOFError)


async def test_an_address_that_raises_omits_only_its_peer(pair, monkeypatch):
    victim, member = pair
    await eventually(lambda: _is_connected(victim, member.peer_id))
    num_faults, read, this_task = victim.guard.num_faults[Place.PRESENCE], client.address_texts, asyncio.current_task()

    def read_or_fail(raws):
        if asyncio.current_task() is this_task:  # not for the loops of the node
            raise RecursionError("invalid")
        return read(raws)

    with monkeypatch.context() as patch:
        patch.setattr(client, "address_texts", read_or_fail)
        assert await victim._session.client.connected_peers() == []
    assert victim.guard.num_faults[Place.PRESENCE] > num_faults
    assert await _is_connected(victim, member.peer_id)


async def _is_connected(node: Libp2pGossip, peer_id: str) -> bool:
    return any(peer.peer_id == peer_id for peer in await node.connected_peers())


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"\x01\xff\xff\xff\xff", "frame_size"), (b"\x09\0\0\0\0", "frame_kind"), (b"\x02\0\0\0\0", "frame_kind"),
        (b"\x01\0\0\0\x05short", "ids"), (b"\x01\0\0\0\0", "ids"), (b"GET / HTTP/1.1\r\n", "frame_kind"),
        (b"\x01", "timed_out"), (b"", "timed_out"),
    ],
)  # fmt: skip
async def test_invalid_bytes_on_a_stream_are_counted(pair, sent, reason):
    victim, attacker = pair
    victim.serve(BodyStore(b"body").lookup)
    num_before = victim.counters.serve_errors.get(reason, 0)
    fetch = protocol("r", RpcService.FETCH)
    async with attacker._supervisor.session.client.stream(victim.peer_id, fetch, timeout_s=30) as (reader, writer):
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), 10) == b""
    await eventually(lambda: victim.counters.serve_errors.get(reason, 0) == num_before + 1)


async def test_a_record_cannot_be_overwritten_by_another_peer(pair):
    victim, attacker = pair
    assert await victim.publish_record(b"authentic", ttl_s=60)
    node = attacker._supervisor.session.directory._node
    key, expires_at = record_key("r", victim.peer_id), time.time() + 300
    forged = sign_entry(Identity.generate(), EntryKind.RECORD, "r", b"forged", expires_at=expires_at)
    for value in (b"plain", forged, bytes(3 << 20)):
        num_refused = victim.counters.records_refused
        await node.store(key, value, expires_at)
        await eventually(lambda before=num_refused: victim.counters.records_refused > before)
        assert await victim.get_record(victim.peer_id) == b"authentic"
        assert await attacker.get_record(victim.peer_id) == b"authentic"


async def test_neighbors_in_the_directory_stay_in_the_routing_table(pair):
    for node, other in (pair, pair[::-1]):
        table = node._supervisor.session.directory._node.protocol.routing_table
        await eventually(lambda table=table, other=other: PeerID.from_base58(other.peer_id) in table)


async def test_a_stale_copy_does_not_hide_a_newer_record(pair):
    owner, reader = pair
    key = DHTID.generate(source=record_key("r", owner.peer_id))
    storages = [node._supervisor.session.directory._node.protocol.storage for node in pair]
    assert await owner.publish_record(b"old", ttl_s=60)
    old = storages[1].get(key)
    assert await owner.publish_record(b"new", ttl_s=90)
    del storages[1][key]
    assert storages[1].store(key, old.value, old.expiration_time)
    assert await reader.get_record(owner.peer_id) == b"new"
