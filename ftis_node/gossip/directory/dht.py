"""The directory: small records under their owners' keys, and buckets of a run's members, in hivemind's Kademlia DHT.

The DHT node runs in the daemon's event loop and uses p2pd over one persistent control connection. It starts without
peers; `join` connects it later. It caches nothing, because a record is read to see whether it has changed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ftis_node.errors import RecordError
from ftis_node.gossip.directory.entries import (
    DirectoryEntry,
    EntryKind,
    is_of_another,
    pack_manifest,
    sign_entry,
    split_private,
    unpack_addresses,
    unpack_manifest,
    verify_entry,
)
from ftis_node.gossip.directory.validators import (
    MAX_STORED_KEYS,
    EntryValidator,
    RequestLimiter,
    StoredRun,
    count_stored_runs,
    entries_in,
)
from ftis_node.gossip.multiaddr import usable_addresses
from ftis_node.gossip.names import bucket_key, manifest_key, record_key
from ftis_node.gossip.p2pd.client import cancel_and_wait, shielded_call
from ftis_node.gossip.p2pd.hivemind_bindings import (
    DHTID,
    AttachedP2P,
    DHTNode,
    Multiaddr,
    PeerID,
    dht_pb2,
)
from ftis_node.gossip.p2pd.session_parts import SessionParts
from ftis_node.records.identity import peer_id_from_text
from ftis_node.swarm.lru import LruDict
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.topology import bucket_of

T = TypeVar("T")

logger = logging.getLogger(__name__)

NUM_SKEWS = 9
MIN_CLOCKS = 2
NAMED_SKEW_S = 3.0  # hivemind peers refuse messages with more
MAX_OWN_ENTRIES = 64


def majority_skew(skews_s: Sequence[float]) -> float | None:
    """Return a skew that at least half of two or more clocks reach or exceed in size; None for fewer clocks."""
    return None if len(skews_s) < MIN_CLOCKS else sorted(skews_s, key=abs)[(len(skews_s) - 1) // 2]


class Directory:
    """This node's part of the DHT. `attach` creates it."""

    def __init__(self, node: Any, limiter: RequestLimiter, parts: SessionParts) -> None:
        self._node = node
        self._limiter = limiter
        self._parts = parts
        self._guard = parts.guard
        self._peer_id = parts.identity.peer_id
        self._skews_s = LruDict[str, float](NUM_SKEWS)  # by peer: its clock minus our monotonic clock
        self._named = LruDict[str, None](NUM_SKEWS)  # peers whose clock the log has named
        self._own_expiries = LruDict[float, None](MAX_OWN_ENTRIES)

    @classmethod
    async def attach(cls, control_path: Path, parts: SessionParts) -> Directory:
        """Start the DHT node over the p2pd at `control_path`."""
        node_id = DHTID.generate(source=parts.identity.peer)  # stable across restarts
        limiter = RequestLimiter(node_id.to_bytes(), guard=parts.guard)
        node = await DHTNode.create(
            p2p=await AttachedP2P.replicate(Multiaddr(f"/unix{control_path}")),
            node_id=node_id,
            wait_timeout=parts.settings.directory_rpc_timeout_s,
            cache_locally=False,
            cache_on_store=False,
            cache_nearest=0,
            cache_refresh_before_expiry=0,
            cache_size=1,
            record_validator=EntryValidator(parts.limits, counters=parts.counters, guard=parts.guard),
            authorizer=limiter,
        )
        node.protocol.storage.maxsize = MAX_STORED_KEYS
        limiter.storage = node.protocol.storage
        return cls(node, limiter, parts)

    @property
    def clock_skew_s(self) -> float | None:
        """Return the clock offset on which most recent peers agree, in seconds (peer minus local).

        It is None with fewer than two peers, because either of two clocks may be the wrong one.
        """
        return majority_skew(self.skews_s)

    @property
    def skews_s(self) -> list[float]:
        """Return the clock offsets of recent peers in seconds (peer minus local)."""
        ours = time.time() - time.monotonic()  # computed now, so that a clock change is visible at once
        return [clock_s - ours for clock_s in self._skews_s.values()]

    def _note_clock(self, peer_id: str, clock_s: float) -> None:
        self._skews_s[peer_id] = clock_s
        skew_s = clock_s - (time.time() - time.monotonic())
        if abs(skew_s - (self.clock_skew_s or 0.0)) > NAMED_SKEW_S and peer_id not in self._named:
            self._named[peer_id] = None
            which = "one of the two is wrong" if self.clock_skew_s is None else "most peers disagree with it"
            logger.warning("the clock of peer %s is %+.0f s off this machine's: %s", peer_id, skew_s, which)

    @property
    def is_serving(self) -> bool:
        return self._limiter.is_serving

    def serve(self, is_serving: bool) -> None:
        """Set whether this node stores entries for other nodes and answers their queries.

        A node behind a relay only queries, because other nodes could often not reach its entries.
        """
        protocol = self._node.protocol
        self._limiter.is_serving = is_serving
        protocol.client_mode = not is_serving  # prevents storing at this node itself, too
        protocol.node_info = (
            dht_pb2.NodeInfo(node_id=self._node.node_id.to_bytes()) if is_serving else dht_pb2.NodeInfo()
        )

    async def join(self, peer_ids: Iterable[str]) -> int:
        """Contact connected peers in the DHT and, through them, this node's neighbors; return how many answered."""
        answered = await asyncio.gather(*map(self._meet, peer_ids))
        if any(answered):
            await self._call(self._node.find_nearest_nodes([self._node.node_id]))
        return sum(answered)

    async def publish_record(self, run_id: str, value: bytes, *, ttl_s: float) -> bool:
        """Store this node's record under its own key; return whether a node accepted it."""
        key = record_key(run_id, self._peer_id)
        return await self._store(EntryKind.RECORD, run_id, key, None, value, ttl_s=ttl_s)

    async def get_record(self, run_id: str, peer_id: str) -> bytes | None:
        entry = await self._get(record_key(run_id, peer_id))
        return None if entry is None else self._decrypted(entry)

    async def publish_manifest(self, run_id: str, canonical: bytes, *, ttl_s: float) -> bool:
        key = manifest_key(run_id)
        return await self._store(EntryKind.MANIFEST, run_id, key, None, pack_manifest(canonical), ttl_s=ttl_s)

    async def get_manifest(self, run_id: str) -> bytes | None:
        """Return the canonical text of a run's manifest, None if it is not found."""
        entry = await self._get(manifest_key(run_id))
        return None if entry is None else unpack_manifest(entry.payload, run_id=run_id)

    async def register(self, run_id: str, payload: bytes, *, ttl_s: float) -> bool:
        key = bucket_key(run_id, bucket_of(self._peer_id))
        if self._own_expiries:
            with suppress(TimeoutError):
                await self._look_for_duplicate(key)  # before our next entry replaces the other node's
        return await self._store(EntryKind.MEMBER, run_id, key, self._peer_id, payload, ttl_s=ttl_s)

    async def members(self, run_id: str, buckets: Iterable[int]) -> dict[str, list[str]]:
        """Return the other members registered in these buckets of a run, with the usable addresses of each."""
        keys = [bucket_key(run_id, bucket) for bucket in buckets]
        found = await self._call(self._node.get_many(keys, sufficient_expiration_time=float("inf")))
        members: dict[str, list[str]] = {}
        for bucket in found.values():
            for subkey, data in entries_in(bucket):
                with self._guard.work_for(subkey, Place.DIRECTORY):
                    entry = verify_entry(data, max_record_bytes=self._parts.limits.max_record_bytes)
                    if entry is not None and entry.peer_id != self._peer_id:
                        if (claimed := self._decrypted(entry)) is not None:
                            members[entry.peer_id] = usable_addresses(entry.peer_id, unpack_addresses(claimed))
        return members

    async def _look_for_duplicate(self, key: str) -> None:
        found = await self._call(self._node.get_many([key], sufficient_expiration_time=float("inf")))
        raw = dict(entries_in(found[key])).get(self._peer_id, b"")
        entry = verify_entry(raw, max_record_bytes=self._parts.limits.max_record_bytes)
        if entry is not None and is_of_another(entry.expires_at, own=self._own_expiries):
            self._parts.on_duplicate_identity()

    def stored_runs(self) -> dict[str, StoredRun]:
        """Return the runs with members stored at this node, the run with the most members first."""
        return count_stored_runs(self._node.protocol.storage, guard=self._guard)

    async def lost(self) -> None:
        """Wait until the connection to p2pd has ended or its reader has failed."""
        await asyncio.wait([self._node.p2p._client.control._read_task])

    async def close(self) -> None:
        """Disconnect from p2pd, which exits when its last client disconnects."""
        self._node.is_alive = False
        control = self._node.p2p._client.control
        await self._node.p2p.shutdown()
        await cancel_and_wait(control._read_task, control._write_task, *control._handler_tasks.values())

    async def _get(self, key: str) -> DirectoryEntry | None:
        found = await self._call(self._node.get(key, latest=True))
        max_bytes = self._parts.limits.max_record_bytes
        return None if found is None else verify_entry(found.value, max_record_bytes=max_bytes)

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a DHT call. Raises TimeoutError after a time-out or a failure of hivemind."""
        try:
            return await shielded_call(work, timeout_s=self._parts.settings.directory_timeout_s)
        except (OSError, EOFError):
            raise
        except Exception as error:  # of many types: hivemind asserts on peers' answers
            logger.warning("directory call failed: %r", error)
            raise TimeoutError(f"directory call failed: {error!r}") from error

    async def _meet(self, peer_id: str) -> bool:
        protocol, timeout_s = self._node.protocol, self._parts.settings.directory_timeout_s
        with self._guard.work_for(peer_id, Place.DIRECTORY, passes=(OSError, EOFError)):
            peer = PeerID(peer_id_from_text(peer_id))
            sent_at = time.monotonic()
            try:
                ping = dht_pb2.PingRequest(peer=protocol.node_info)
                pinging = protocol.get_stub(peer).rpc_ping(ping, timeout=protocol.wait_timeout)
                response = await shielded_call(pinging, timeout_s=timeout_s)
            except Exception as error:  # hivemind raises exceptions of many types for a peer that does not answer
                logger.debug("no answer from %s to the directory ping: %r", peer, error)
                return False
            if response is None or not response.peer.node_id or not math.isfinite(response.dht_time):
                return False
            self._note_clock(peer_id, response.dht_time - (sent_at + time.monotonic()) / 2)
            noting = protocol.update_routing_table(DHTID.from_bytes(response.peer.node_id), peer, responded=True)
            await shielded_call(noting, timeout_s=timeout_s)
            return True
        return False

    def _decrypted(self, entry: DirectoryEntry) -> bytes | None:
        """Return an entry's decrypted payload; None if it was not encrypted with this run's secret."""
        try:
            first, private = split_private(entry.kind, entry.payload)
            return first + self._parts.cipher.decrypt(private, entry.kind.name, entry.peer_id)
        except RecordError:
            logger.debug("cannot decrypt the directory entry of %s with this run's secret", entry.peer_id)
            return None

    async def _store(
        self, kind: EntryKind, run_id: str, key: str, subkey: str | None, payload: bytes, *, ttl_s: float
    ) -> bool:
        expires_at = time.time() + ttl_s
        if kind is EntryKind.MEMBER:
            self._own_expiries[expires_at] = None
        first, private = split_private(kind, payload)
        ciphertext = self._parts.cipher.encrypt(private, kind.name, self._peer_id)
        entry = sign_entry(self._parts.identity, kind, run_id, first + ciphertext, expires_at=expires_at)
        storing = self._node.store(key, entry, expires_at, subkey=subkey, exclude_self=not self.is_serving)
        return bool(await self._call(storing))
