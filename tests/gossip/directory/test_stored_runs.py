"""The number of shards that a bootstrap node forwards does not depend on one member's claim."""

from __future__ import annotations

import time
from types import SimpleNamespace

from ftis_node.gossip.directory.dht import Directory
from ftis_node.gossip.directory.entries import EntryKind, pack_member, sign_entry
from ftis_node.gossip.directory.validators import StoredRun
from ftis_node.gossip.p2pd.hivemind_bindings import DHTID, DictionaryDHTValue
from ftis_node.records.identity import Identity
from ftis_node.swarm.peer_guard import PeerGuard

RUN, OTHER_RUN = "ab" * 16, "cd" * 16


def _packed(run_id: str, num_shards: int, *, later: float) -> bytes:
    raw = sign_entry(
        Identity.generate(), EntryKind.MEMBER, run_id, pack_member([], num_shards=num_shards), expires_at=later
    )
    return b"\xc5" + len(raw).to_bytes(2, "big") + raw


def test_a_member_that_claims_fewer_shards_removes_none():
    storage, later = [], time.time() + 60
    for run_id, claims in ((RUN, (1, 8)), (RUN, (8, 1)), (RUN, (1,)), (OTHER_RUN, (2,))):
        bucket = DictionaryDHTValue()
        for number, num_shards in enumerate(claims):
            bucket.store(f"member-{number}", _packed(run_id, num_shards, later=later), later)
        storage.append((DHTID.generate(), SimpleNamespace(value=bucket)))
    directory = object.__new__(Directory)
    directory._guard = PeerGuard()
    directory._node = SimpleNamespace(protocol=SimpleNamespace(storage=dict(storage)))
    assert directory.stored_runs() == {RUN: StoredRun(8, 5), OTHER_RUN: StoredRun(2, 1)}
