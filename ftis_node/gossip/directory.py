"""The directory: small records under peers' own keys, and buckets of a run's members, in hivemind's Kademlia DHT.

The DHT node lives in the daemon's event loop, beside p2pd, over one persistent control connection. It needs no peer to
start; others are met later with `join`. It keeps no cache: a record is asked for because it may have changed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import TYPE_CHECKING, Any

from ftis_node.gossip.bindings import DHTID, P2P, DHTNode, DictionaryDHTValue, Multiaddr, PeerID, dht_pb2
from ftis_node.gossip.door import MAX_STORED_KEYS, EntryValidator, RequestBounds, unpack_bytes
from ftis_node.gossip.entries import EntryKind, run_of, seal, unpack_addresses, unseal
from ftis_node.gossip.names import bucket_key, bucket_of, record_key

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ftis_node.gossip.base import GossipLimits
    from ftis_node.records.identity import Identity

logger = logging.getLogger(__name__)


class Directory:
    """This node's part of the DHT. Made by `attach`."""

    def __init__(self, node: Any, *, identity: Identity, limits: GossipLimits, timeout_s: float) -> None:
        self._node = node
        self._identity = identity
        self._limits = limits
        self._timeout_s = timeout_s
        self.clock_skew_s: float | None = None  # a peer's clock less ours, at the last peer met

    @classmethod
    async def attach(
        cls, control_path: Path, *, identity: Identity, limits: GossipLimits, rpc_timeout_s: float, timeout_s: float
    ) -> Directory:
        """Starts the DHT node over the p2pd at `control_path`."""
        bounds = RequestBounds()
        node = await DHTNode.create(
            p2p=await P2P.replicate(Multiaddr(f"/unix{control_path}")),
            node_id=DHTID.generate(source=identity.peer),  # the same after a restart
            wait_timeout=rpc_timeout_s,
            cache_locally=False,
            cache_on_store=False,
            cache_nearest=0,
            cache_refresh_before_expiry=0,
            cache_size=1,
            record_validator=EntryValidator(
                max_record_bytes=limits.max_record_bytes, max_ttl_s=limits.max_record_ttl_s
            ),
            authorizer=bounds,
        )
        node.protocol.storage.maxsize = MAX_STORED_KEYS
        bounds.storage = node.protocol.storage
        return cls(node, identity=identity, limits=limits, timeout_s=timeout_s)

    async def join(self, peer_ids: Iterable[str]) -> int:
        """Meets connected peers and, through them, this node's neighbours; how many of `peer_ids` answered."""
        answered = await asyncio.gather(*(self._meet(PeerID.from_base58(peer_id)) for peer_id in peer_ids))
        if any(answered):
            async with asyncio.timeout(self._timeout_s):
                await self._node.find_nearest_nodes([self._node.node_id])
        return sum(answered)

    async def publish_record(self, run_id: str, value: bytes, *, ttl_s: float) -> bool:
        """Puts this node's record under its own key; whether a node took it."""
        key = record_key(run_id, self._identity.peer_id)
        return await self._store(EntryKind.RECORD, run_id, key, None, value, ttl_s=ttl_s)

    async def get_record(self, run_id: str, peer_id: str) -> bytes | None:
        """The newest record of a peer."""
        async with asyncio.timeout(self._timeout_s):
            found = await self._node.get(record_key(run_id, peer_id), latest=True)
        entry = None if found is None else unseal(found.value, max_record_bytes=self._limits.max_record_bytes)
        return None if entry is None else entry.payload

    async def register(self, run_id: str, payload: bytes, *, ttl_s: float) -> bool:
        """Registers this node among the run's members; whether a node took it."""
        peer_id = self._identity.peer_id
        key = bucket_key(run_id, bucket_of(peer_id))
        return await self._store(EntryKind.MEMBER, run_id, key, peer_id, payload, ttl_s=ttl_s)

    async def members(self, run_id: str, buckets: Iterable[int]) -> dict[str, list[str]]:
        """Members registered in some of a run's buckets, and the addresses that each claims."""
        async with asyncio.timeout(self._timeout_s):
            found = await self._node.get_many(
                [bucket_key(run_id, bucket) for bucket in buckets], sufficient_expiration_time=float("inf")
            )
        members: dict[str, list[str]] = {}
        for bucket in found.values():
            for item in bucket.value.values() if bucket is not None else ():
                entry = unseal(item.value, max_record_bytes=self._limits.max_record_bytes)
                if entry is not None and entry.peer_id != self._identity.peer_id:
                    members[entry.peer_id] = unpack_addresses(entry.payload)
        return members

    def runs_in_sight(self) -> set[str]:
        """Runs with a member whose entry is stored here."""
        stored_values = [stored.value for _, stored in self._node.protocol.storage.items()]
        buckets = [value for value in stored_values if isinstance(value, DictionaryDHTValue)]
        firsts = [packed for bucket in buckets for _, (packed, _) in itertools.islice(bucket.items(), 1)]
        return {run for packed in firsts if (run := run_of(unpack_bytes(packed) or b"")) is not None}

    async def lost(self) -> None:
        """Returns when the connection to p2pd has ended, or its reader has failed."""
        await asyncio.wait([self._node.p2p._client.control._read_task])

    async def close(self) -> None:
        """Lets go of p2pd, which ends by itself when nobody holds on to it."""
        self._node.is_alive = False
        control = self._node.p2p._client.control
        await self._node.p2p.shutdown()
        handlers = tuple(control._handler_tasks.values())
        for task in handlers:
            task.cancel()
        await asyncio.gather(control._read_task, control._write_task, *handlers, return_exceptions=True)

    async def _meet(self, peer: Any) -> bool:
        protocol = self._node.protocol
        sent_at = time.time()
        try:
            response = await protocol.get_stub(peer).rpc_ping(
                dht_pb2.PingRequest(peer=protocol.node_info), timeout=protocol.wait_timeout
            )
        except Exception as error:  # hivemind raises plain exceptions of many kinds for a peer that does not answer
            logger.debug("%s did not answer the directory's ping: %r", peer, error)
            return False
        if response is None or not response.peer.node_id:
            return False
        self.clock_skew_s = response.dht_time - (sent_at + time.time()) / 2
        await protocol.update_routing_table(DHTID.from_bytes(response.peer.node_id), peer, responded=True)
        return True

    async def _store(
        self, kind: EntryKind, run_id: str, key: str, subkey: str | None, payload: bytes, *, ttl_s: float
    ) -> bool:
        expires_at = time.time() + ttl_s
        entry = seal(self._identity, kind, run_id, payload, expires_at=expires_at)
        async with asyncio.timeout(self._timeout_s):
            kept = await self._node.store(key, entry, expires_at, subkey=subkey)
        return bool(kept)
