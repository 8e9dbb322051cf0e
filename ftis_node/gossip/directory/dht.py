"""The directory: small records under their owners' keys, and buckets of a run's members, in hivemind's Kademlia DHT.

The DHT node runs in the daemon's event loop and uses p2pd over one persistent control connection. It starts without
peers; `join` connects it later. It caches nothing, because a record is read to see whether it has changed.

Nodes near a key can drop its entries, or name nodes that do not exist. An attacker who tries enough identities has such
nodes. So this node also stores at the configured peers and asks some of them, at any distance to the key.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
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
from ftis_node.gossip.directory.storage import (
    MAX_MEMBERS_READ,
    DirectorySerializer,
    EntryStorage,
    StoredRun,
    count_stored_runs,
    entries_in,
    unpack_bytes,
)
from ftis_node.gossip.directory.validators import EntryValidator, RequestLimiter, node_id_of
from ftis_node.gossip.multiaddr import usable_addresses
from ftis_node.gossip.names import bucket_key, manifest_key, record_key
from ftis_node.gossip.p2pd.client import cancel_and_wait, shielded_call
from ftis_node.gossip.p2pd.hivemind_bindings import (
    DHTID,
    AttachedP2P,
    DHTNode,
    MSGPackSerializer,
    Multiaddr,
    PeerID,
    dht_pb2,
)
from ftis_node.gossip.session_parts import SessionParts
from ftis_node.records.identity import peer_id_from_text
from ftis_node.swarm.lru import LruDict
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.topology import bucket_of
from ftis_node.telemetry.clock import REFUSED_SKEW_S

T = TypeVar("T")

logger = logging.getLogger(__name__)

NUM_SKEWS = 9
MIN_CLOCKS = 2
MAX_OWN_ENTRIES = 64
NUM_GIVEN_ASKED = 2  # configured peers, in each look-up
NUM_KEYS_ASKED = 4  # of one peer at once: at most 256 members to verify before other tasks run

Found = dict[str, list[tuple[str, float, bytes]]]  # for each key: subkeys, expiries and entries


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
        self._given = {peer.peer_id for peer in parts.settings.peer_addresses}
        self._answering: list[PeerID] = []  # those of the configured peers that answered the last ping
        self._own_expiries = LruDict[float, None](MAX_OWN_ENTRIES)

    @classmethod
    async def attach(cls, control_path: Path, parts: SessionParts) -> Directory:
        """Start the DHT node over the p2pd at `control_path`."""
        node_id = DHTID.generate(source=parts.identity.peer)  # stable across restarts
        limiter = RequestLimiter(node_id.to_bytes(), guard=parts.guard)
        validator = EntryValidator(parts.limits, counters=parts.counters, guard=parts.guard)
        node = await DHTNode.create(
            p2p=await AttachedP2P.replicate(Multiaddr(f"/unix{control_path}")),
            node_id=node_id,
            wait_timeout=parts.settings.directory_rpc_timeout_s,
            cache_locally=False,
            cache_on_store=False,
            cache_nearest=0,
            cache_refresh_before_expiry=0,
            cache_size=1,
            record_validator=validator,
            authorizer=limiter,
        )
        node.protocol.storage, node.protocol.serializer = EntryStorage(), DirectorySerializer
        node.protocol._validate_dictionary = validator.keep_valid
        _bind_node_ids(node.protocol)
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
        if abs(skew_s - (self.clock_skew_s or 0.0)) > REFUSED_SKEW_S and peer_id not in self._named:
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
        peer_ids = list(peer_ids)
        answers = await asyncio.gather(*map(self._meet, peer_ids))
        answering = [peer_id for peer_id, has_answered in zip(peer_ids, answers, strict=True) if has_answered]
        self._answering = [PeerID(peer_id_from_text(peer_id)) for peer_id in answering if peer_id in self._given]
        if answering:
            await self._call(self._node.find_nearest_nodes([self._node.node_id]))
        return len(answering)

    async def publish_record(self, run_id: str, value: bytes, *, ttl_s: float) -> bool:
        """Store this node's record under its own key; return whether a node accepted it."""
        return await self._store(EntryKind.RECORD, run_id, value, ttl_s=ttl_s)

    async def get_record(self, run_id: str, peer_id: str) -> bytes | None:
        entry = await self._get(record_key(run_id, peer_id))
        return None if entry is None else self._decrypted(entry)

    async def publish_manifest(self, run_id: str, canonical: bytes, *, ttl_s: float) -> bool:
        return await self._store(EntryKind.MANIFEST, run_id, pack_manifest(canonical), ttl_s=ttl_s)

    async def get_manifest(self, run_id: str) -> bytes | None:
        """Return the canonical text of a run's manifest, None if it is not found."""
        entry = await self._get(manifest_key(run_id))
        return None if entry is None else unpack_manifest(entry.payload, run_id=run_id)

    async def register(self, run_id: str, payload: bytes, *, ttl_s: float) -> bool:
        if self._own_expiries:
            with suppress(TimeoutError):
                await self._look_for_duplicate(run_id)  # before our next entry replaces the other node's
        return await self._store(EntryKind.MEMBER, run_id, payload, ttl_s=ttl_s)

    async def members(self, run_id: str, buckets: Iterable[int]) -> dict[str, list[str]]:
        """Return other members registered in these buckets of a run, with the usable addresses of each.

        At most `MAX_MEMBERS_READ` of a bucket, chosen at random. Other tasks run between two of them.
        """
        found = await self._find([bucket_key(run_id, bucket) for bucket in buckets])
        members: dict[str, list[str]] = {}
        for bucket in found.values():
            for subkey in random.sample(list(bucket), min(len(bucket), MAX_MEMBERS_READ)):  # nosec B311: it is no secret
                await asyncio.sleep(0)
                with self._guard.work_for(subkey, Place.DIRECTORY):
                    entry = verify_entry(bucket[subkey], max_record_bytes=self._parts.limits.max_record_bytes)
                    if entry is not None and entry.peer_id != self._peer_id:
                        if (claimed := self._decrypted(entry)) is not None:
                            members[entry.peer_id] = usable_addresses(entry.peer_id, unpack_addresses(claimed))
        return members

    async def _look_for_duplicate(self, run_id: str) -> None:
        key = bucket_key(run_id, bucket_of(self._peer_id))
        raw = (await self._find([key]))[key].get(self._peer_id, b"")
        entry = verify_entry(raw, max_record_bytes=self._parts.limits.max_record_bytes)
        if entry is not None and is_of_another(entry.expires_at, own=self._own_expiries):
            self._parts.on_duplicate_identity()

    def stored_runs(self) -> dict[str, StoredRun]:
        """Return the runs with members stored at this node, the run with the most members first."""
        return count_stored_runs(self._node.protocol.storage)

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
        found = (await self._find([key]))[key]
        max_bytes = self._parts.limits.max_record_bytes
        return verify_entry(found[""], max_record_bytes=max_bytes) if "" in found else None

    async def _find(self, keys: list[str]) -> dict[str, dict[str, bytes]]:
        """Return for each key the newest entry of each subkey. Raises TimeoutError if no node answers."""
        asked = random.sample(self._answering, min(len(self._answering), NUM_GIVEN_ASKED))  # nosec B311: it is no secret
        parts = [keys[at : at + NUM_KEYS_ASKED] for at in range(0, len(keys), NUM_KEYS_ASKED)]
        asking = [partial(self._ask, peer, part) for peer in asked for part in parts]
        answers = await self._call_all(partial(self._search, keys), *asking)
        entries = {key: [entry for answer in answers for entry in answer.get(key, ())] for key in keys}
        return {key: {one[0]: one[2] for one in sorted(entries[key], key=itemgetter(1))} for key in keys}

    async def _search(self, keys: list[str]) -> Found:
        found = await self._node.get_many(keys, sufficient_expiration_time=math.inf)
        return {key: list(entries_in(found[key])) for key in keys}

    async def _ask(self, peer: PeerID, keys: list[str]) -> Found:
        ids = {key: DHTID.generate(source=key) for key in keys}
        found = await self._node.protocol.call_find(peer, ids.values())
        if found is None:
            raise TimeoutError(f"no answer from {peer}")
        answer: Found = {key: [] for key in keys}
        for key, key_id in ids.items():
            for subkey, expires_at, packed in entries_in(found[key_id][0]):
                with self._guard.work_for(subkey, Place.DIRECTORY):
                    answer[key].append((subkey, expires_at, unpack_bytes(packed) or b""))
        return answer

    async def _call_all(self, *makers: Callable[[], Coroutine[Any, Any, T]]) -> list[T]:
        """Return the results of the calls that do not time out. Raises what `_call` raises if all do."""

        async def call(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
            return await self._call(make())  # a canceled task leaves no coroutine that never ran

        results = await asyncio.gather(*map(call, makers), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        lost = [error for error in errors if not isinstance(error, TimeoutError)]
        if lost or len(errors) == len(results):
            raise (lost or errors)[0]
        if errors:
            logger.debug("%d of %d directory calls had no answer in time", len(errors), len(results))
        return [result for result in results if not isinstance(result, BaseException)]

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
            is_bound = response is not None and response.peer.node_id == node_id_of(peer.to_bytes())
            if not is_bound or not math.isfinite(response.dht_time):
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

    async def _store(self, kind: EntryKind, run_id: str, payload: bytes, *, ttl_s: float) -> bool:
        expires_at = time.time() + ttl_s
        if kind is EntryKind.MEMBER:
            self._own_expiries[expires_at] = None
        first, private = split_private(kind, payload)
        ciphertext = self._parts.cipher.encrypt(private, kind.name, self._peer_id)
        entry = DirectoryEntry(kind, run_id, self._peer_id, expires_at, first + ciphertext)
        signed = sign_entry(self._parts.identity, kind, run_id, entry.payload, expires_at=expires_at)
        key, subkey = entry.key, entry.subkey
        storing = partial(self._node.store, key, signed, expires_at, subkey=subkey, exclude_self=not self.is_serving)
        given = [partial(self._store_at, peer, key, subkey, signed, expires_at=expires_at) for peer in self._answering]
        return any(await self._call_all(storing, *given))

    async def _store_at(self, peer: PeerID, key: str, subkey: str | None, entry: bytes, *, expires_at: float) -> bool:
        keys, values = [DHTID.generate(source=key)], [MSGPackSerializer.dumps(entry)]
        stored = await self._node.protocol.call_store(peer, keys, values, [expires_at], subkeys=[subkey])
        return bool(stored and stored[0])


def _bind_node_ids(protocol: Any) -> None:
    """Keep nodes whose id is not that of their peer out of the routing table.

    hivemind compares all stored keys with each id that it adds.
    """
    update = protocol.update_routing_table

    async def update_if_bound(node_id: DHTID | None, peer: PeerID, responded: bool = True) -> None:
        if node_id is None or node_id.to_bytes() == node_id_of(peer.to_bytes()):
            await update(node_id, peer, responded)

    protocol.update_routing_table = update_if_bound
