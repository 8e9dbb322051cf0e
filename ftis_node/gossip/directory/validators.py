"""Validation of directory traffic: entries to store, requests and answers from peers.

hivemind's DHT stores any value with any expiry and answers requests of any size. A record validator checks the owner's
signature, the key and the expiry. An authorizer sees every request before it is processed. A node's DHT id must be the
hash of its peer id. Otherwise one peer could name itself as all the nodes nearest to a key.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

from ftis_node.gossip.directory.entries import (
    DirectoryEntry,
    EntryKind,
    has_valid_expiry,
    unpack_manifest,
    verify_entry,
)
from ftis_node.gossip.directory.storage import MemberBucket, unpack_bytes, unpack_members
from ftis_node.gossip.p2pd.hivemind_bindings import (
    DHTID,
    AuthorizerBase,
    DHTRecord,
    MSGPackSerializer,
    RecordValidatorBase,
    dht_pb2,
)
from ftis_node.gossip.types import GossipCounters, GossipLimits
from ftis_node.swarm.peer_guard import UNPROVEN, PeerGuard, Place

MAX_KEYS_PER_FIND = 16
MAX_KEYS_PER_STORE = 256  # also the members of all dictionaries in one request
MAX_NEAREST = 32  # nodes that a peer may name for a key; hivemind names 20
IS_DICTIONARY = b""  # instead of a subkey: the value is a whole dictionary


def node_id_of(peer: bytes) -> bytes:
    """Return the DHT id of the node with this raw peer id."""
    return bytes(DHTID.generate(source=peer).to_bytes())


class EntryValidator(RecordValidatorBase):  # type: ignore[misc]
    """Record validator: accepts only entries with a valid signature, the signed key and the signed expiry."""

    def __init__(self, limits: GossipLimits, *, counters: GossipCounters, guard: PeerGuard) -> None:
        self._limits = limits
        self._counters = counters
        self._guard = guard

    def validate(self, record: DHTRecord) -> bool:
        """Return whether this node may store a record, or use a record that it read."""
        is_good = False
        with self._guard.work_for(UNPROVEN, Place.DIRECTORY):  # hivemind calls this in its own tasks
            raw = unpack_bytes(record.value)
            entry = None if raw is None else verify_entry(raw, max_record_bytes=self._limits.max_record_bytes)
            if entry is not None:
                with self._guard.work_for(entry.peer_id, Place.DIRECTORY):
                    is_good = self._belongs(entry, record)
        self._counters.records_refused += not is_good
        return is_good

    def keep_valid(self, key: bytes, bucket: Any) -> bool:
        """Drop the invalid members of a bucket that this node read under `key`; return whether any remains.

        One member's expiry that is invalid by this node's clock must not hide the others.
        """
        if not isinstance(bucket, MemberBucket):
            return False
        for peer_id, (packed, expires_at) in list(bucket.items()):
            if not self.validate(DHTRecord(key, MSGPackSerializer.dumps(peer_id), packed, expires_at)):
                del bucket[peer_id]
        return bool(bucket)

    def _belongs(self, entry: DirectoryEntry, record: DHTRecord) -> bool:
        expires_at, max_ttl_s = record.expiration_time, self._limits.max_record_ttl_s
        if entry.kind is EntryKind.MANIFEST and unpack_manifest(entry.payload, run_id=entry.run_id) is None:
            return False
        return (
            has_valid_expiry(entry, expires_at=expires_at, now=time.time(), max_ttl_s=max_ttl_s)
            and bool(record.key == DHTID.generate(source=entry.key).to_bytes())
            and bool(record.subkey == MSGPackSerializer.dumps(entry.subkey))
        )


class RequestLimiter(AuthorizerBase):  # type: ignore[misc]
    """Authorizer that truncates requests that cost too much work or memory. It signs nothing: entries are signed.

    A serving node never refuses a whole request. A hivemind peer would treat the refusing node as dead and forget it,
    then contact it again and send the same entries again, without end. A node that does not serve refuses all requests,
    so that peers forget it.
    """

    def __init__(self, own_node_id: bytes = b"", *, guard: PeerGuard | None = None) -> None:
        """`own_node_id` is this node's id in the DHT. A request or answer that cannot be truncated is refused."""
        self._guard = guard or PeerGuard()
        self._own_node_id = own_node_id
        self.is_serving = True

    async def validate_request(self, request: Any) -> bool:
        """Truncate a peer's request to the limits; return False to refuse it."""
        if not self.is_serving:
            return False
        with self._guard.work_for(UNPROVEN, Place.DIRECTORY):
            if isinstance(request, dht_pb2.FindRequest):
                del request.keys[MAX_KEYS_PER_FIND:]
            if isinstance(request, dht_pb2.StoreRequest):
                _truncate_store(request)
            return True
        return False

    async def sign_request(self, request: Any, service_public_key: Any) -> None:
        """Truncate this node's own request. hivemind hands over all its entries to a new node in one."""
        if isinstance(request, dht_pb2.StoreRequest):
            _truncate_store(request)

    async def sign_response(self, response: Any, request: Any) -> None:
        """Do nothing."""

    async def validate_response(self, response: Any, request: Any) -> bool:
        """Truncate a peer's answer; `EntryValidator` checks each of its values.

        A peer may name this node among the nearest nodes, maliciously or because this node announced no id. A node that
        does not serve announces none. hivemind fails on such an answer, so this node is removed from it. Nodes whose id
        is not that of their peer are removed, too. hivemind ends a search at a value that never expires.
        """
        with self._guard.work_for(UNPROVEN, Place.DIRECTORY):
            for result in response.results[:MAX_KEYS_PER_FIND] if isinstance(response, dht_pb2.FindResponse) else ():
                named = zip(result.nearest_node_ids, result.nearest_peer_ids, strict=False)
                believed = [
                    (node_id, peer)
                    for node_id, peer in itertools.islice(named, MAX_NEAREST)
                    if node_id == node_id_of(peer) and node_id != self._own_node_id
                ]
                del result.nearest_node_ids[:], result.nearest_peer_ids[:]
                result.nearest_node_ids.extend(node_id for node_id, _ in believed)
                result.nearest_peer_ids.extend(peer for _, peer in believed)
                if not math.isfinite(result.expiration_time):
                    result.expiration_time = 0.0
            return True
        return False


def _truncate_store(request: Any) -> None:
    """Replace whole dictionaries by their members, and keep `MAX_KEYS_PER_STORE` entries, none of them in the cache.

    hivemind's cache has no bounds per bucket, and its entries hide those of the storage.
    """
    columns = request.keys, request.subkeys, request.values, request.expiration_time
    rows = list(itertools.islice(_rows_in(zip(*columns, strict=False)), MAX_KEYS_PER_STORE))
    for number, column in enumerate(columns):
        del column[:]
        column.extend(row[number] for row in rows)
    del request.in_cache[:]
    request.in_cache.extend([False] * len(rows))


def _rows_in(requested: Iterable[tuple[bytes, bytes, bytes, float]]) -> Iterator[tuple[bytes, bytes, bytes, float]]:
    for key, subkey, value, expires_at in requested:
        if subkey != IS_DICTIONARY:
            yield key, subkey, value, expires_at
            continue
        for peer_id, packed, member_expires_at in unpack_members(value):
            yield key, MSGPackSerializer.dumps(peer_id), packed, member_expires_at
