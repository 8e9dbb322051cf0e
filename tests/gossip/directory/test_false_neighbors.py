"""A node of the directory that names false nodes near every key, and drops what it shall store, over real p2pd."""

import os
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from ftis_node.gossip.directory.entries import EntryKind, sign_entry
from ftis_node.gossip.directory.storage import StoredRun
from ftis_node.gossip.directory.validators import node_id_of
from ftis_node.gossip.names import bucket_key
from ftis_node.gossip.p2pd.hivemind_bindings import DHTID, MSGPackSerializer, PeerID, dht_pb2
from ftis_node.records.identity import Identity, peer_id_from_text
from ftis_node.swarm.topology import bucket_of
from tests.waiting import eventually

RUN = "ab" * 16
FORGETTING = SimpleNamespace(store=lambda *_, **__: True, store_subkey=lambda *_: True, get=lambda _: None, items=tuple)
CHOSEN = [(DHTID.from_bytes(node_id_of(peer)), PeerID(peer)) for peer in (os.urandom(38) for _ in range(2000))]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_bound", [False, True], ids=["the attacker under invented ids", "nonexistent peers"])
async def test_false_neighbors_hide_no_entry(start, is_bound):
    bootstrap = await start(run_id=None)
    peers, limits = tuple(bootstrap.addresses), {"directory_rpc_timeout_s": 2.0, "directory_timeout_s": 4.0}
    attacker = await start(peers=peers, **limits)
    own = PeerID(peer_id_from_text(attacker.peer_id))
    protocol = attacker._supervisor.session.directory._node.protocol
    table = bootstrap._supervisor.session.directory._node.protocol.routing_table
    await eventually(lambda: own in table)

    def nearest(key, k, exclude=None):
        if is_bound:
            return sorted(CHOSEN, key=lambda one: key.xor_distance(one[0]))[:k]
        return [(DHTID(key ^ number), own) for number in range(1, k + 1)]

    protocol.storage, protocol.routing_table.get_nearest_neighbors = FORGETTING, nearest
    invented = dht_pb2.NodeInfo(node_id=os.urandom(20))
    bootstrap_id = PeerID(peer_id_from_text(bootstrap.peer_id))
    await protocol.get_stub(bootstrap_id).rpc_ping(dht_pb2.PingRequest(peer=invented), timeout=10)
    members = [await start(peers=peers, **limits) for _ in range(2)]
    for member in members:
        assert await eventually(lambda member=member: member.publish_record(b"record", ttl_s=60))
    reader = await start(peers=peers, **limits)
    directory = reader._supervisor.session.directory

    async def all_found():
        with suppress(TimeoutError):  # the nonexistent peers cost time
            listed = set(await directory.members("r", range(64)))
            records = [await directory.get_record("r", member.peer_id) for member in members]
            return {member.peer_id for member in members} <= listed and records == [b"record"] * 2

    await eventually(all_found, within_s=60)
    for node in (bootstrap, reader, *members):
        known = node._supervisor.session.directory._node.protocol.routing_table.uid_to_peer_id
        assert all(node_id.to_bytes() == node_id_of(peer.to_bytes()) for node_id, peer in known.items())


async def test_a_new_node_receives_the_entries_near_to_it(start):
    """hivemind hands over whole dictionaries; each member in them is checked and stored."""
    first = await start(run_id=None)
    storage = first._supervisor.session.directory._node.protocol.storage
    expires_at, members = time.time() + 60, [Identity.generate() for _ in range(3)]
    for member in members:
        raw = sign_entry(member, EntryKind.MEMBER, RUN, b"shards=1\n", expires_at=expires_at)
        key = DHTID.generate(source=bucket_key(RUN, bucket_of(member.peer_id)))
        assert storage.store_subkey(key, member.peer_id, MSGPackSerializer.dumps(raw), expires_at)
    second = await start(run_id=None, peers=tuple(first.addresses))
    directory = second._supervisor.session.directory
    await eventually(lambda: directory.stored_runs().get(RUN) == StoredRun(1, len(members)))
