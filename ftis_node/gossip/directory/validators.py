"""Validation of directory traffic: entries to store, requests and answers from peers.

hivemind's DHT stores any value with any expiry and answers requests of any size. A record validator checks the owner's
signature, the key and the expiry. An authorizer sees every request before it is processed.

Identities cost nothing, but addresses do (Sybil attack). So if space runs out, the address block with the most entries
loses its newest entries first. A member that claims foreign addresses gains little, because peers cannot dial it.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgpack

from ftis_node.gossip.directory.entries import (
    DirectoryEntry,
    EntryKind,
    has_valid_expiry,
    num_shards_of,
    unpack_addresses,
    unpack_manifest,
    unverified,
    verify_entry,
)
from ftis_node.gossip.p2pd.hivemind_bindings import (
    DHTID,
    AuthorizerBase,
    DHTRecord,
    DictionaryDHTValue,
    MSGPackSerializer,
    RecordValidatorBase,
    dht_pb2,
)
from ftis_node.gossip.types import GossipCounters, GossipLimits
from ftis_node.records.addresses import block_of
from ftis_node.swarm.peer_guard import UNPROVEN, PeerGuard, Place

Key = TypeVar("Key")


MAX_KEYS_PER_FIND = 16
MAX_KEYS_PER_STORE = 256
MAX_MEMBERS_PER_BUCKET = 256  # with 512-byte entries a reply of 16 buckets stays below 3 MiB
MAX_STORED_KEYS = 16384
NUM_MEMBERS_COUNTED = 64  # members in each bucket whose number of shards is taken into account
NO_CONTAINERS = {"max_str_len": 0, "max_array_len": 0, "max_map_len": 0, "max_ext_len": 0}  # of msgpack.unpackb
MAX_NEAREST = 32  # nodes that a peer may name for a key; hivemind names 20


def address_block(addresses: Iterable[str]) -> str:
    """Return the address block of a peer: that of its first public address, else of its first address.

    A peer behind a relay is in the relay's block.
    """
    blocks = [block for address in addresses if (block := block_of(address))]
    return next((block.name for block in blocks if block.is_public), blocks[0].name if blocks else "")


def choose_evicted(blocks: Mapping[Key, str], *, room: int) -> list[Key]:
    """Return the keys to drop so that `room` entries remain. `blocks` gives each entry's block, oldest first."""
    by_block: dict[str, list[tuple[int, Key]]] = defaultdict(list)
    for rank, (key, block) in enumerate(blocks.items()):
        by_block[block].append((rank, key))
    dropped = []
    for _ in range(len(blocks) - room):
        largest = max(by_block.values(), key=lambda held: (len(held), held[-1][0] if held else 0))
        dropped.append(largest.pop()[1])
    return dropped


def sample_by_block(known: Mapping[str, Sequence[str]], *, per_block: int, rng: random.Random) -> list[str]:
    """Return dial candidates from peers and their addresses: at most `per_block` of each block, at random."""
    order = list(known)
    rng.shuffle(order)
    counts: Counter[str] = Counter()
    chosen = []
    for peer_id in order:
        block = address_block(known[peer_id])
        counts[block] += 1
        if counts[block] <= per_block:
            chosen.append(peer_id)
    return chosen


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
        self.storage: Any = None  # the node's local storage; set after its start
        self.is_serving = True

    async def validate_request(self, request: Any) -> bool:
        """Truncate a peer's request to the limits; return False to refuse it."""
        if not self.is_serving:
            return False
        with self._guard.work_for(UNPROVEN, Place.DIRECTORY):
            if isinstance(request, dht_pb2.FindRequest):
                del request.keys[MAX_KEYS_PER_FIND:]
                self._bound_buckets(request.keys)
            if isinstance(request, dht_pb2.StoreRequest):
                columns = request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache
                for column in columns:
                    del column[MAX_KEYS_PER_STORE:]
                self._bound_buckets(request.keys)
            return True
        return False

    def _bound_buckets(self, keys: Iterable[bytes]) -> None:
        for key in set(keys):
            stored = self.storage.get(DHTID.from_bytes(key))
            if stored is None or not isinstance(stored.value, DictionaryDHTValue):
                continue
            bucket = stored.value
            bucket.maxsize = MAX_MEMBERS_PER_BUCKET + MAX_KEYS_PER_STORE  # until the next request
            if len(bucket) > MAX_MEMBERS_PER_BUCKET:
                blocks = {subkey: _claimed_block(packed) for subkey, (packed, _) in bucket.items()}
                for subkey in choose_evicted(blocks, room=MAX_MEMBERS_PER_BUCKET):
                    del bucket[subkey]

    async def sign_request(self, request: Any, service_public_key: Any) -> None:
        """Do nothing."""

    async def sign_response(self, response: Any, request: Any) -> None:
        """Do nothing."""

    async def validate_response(self, response: Any, request: Any) -> bool:
        """Truncate a peer's answer; `EntryValidator` checks each of its values.

        A peer may name this node among the nearest nodes, maliciously or because this node announced no id. A node that
        does not serve announces none. hivemind fails on such an answer, so this node is removed from it.
        """
        with self._guard.work_for(UNPROVEN, Place.DIRECTORY):
            for result in response.results if isinstance(response, dht_pb2.FindResponse) else ():
                nearest = zip(result.nearest_node_ids, result.nearest_peer_ids, strict=False)
                others = [named for named in nearest if named[0] != self._own_node_id][:MAX_NEAREST]
                del result.nearest_node_ids[:], result.nearest_peer_ids[:]
                result.nearest_node_ids.extend(node_id for node_id, _ in others)
                result.nearest_peer_ids.extend(peer_id for _, peer_id in others)
            return True
        return False


@functools.lru_cache(maxsize=4096)
def _claimed_block(packed: bytes) -> str:
    parts = unverified(unpack_bytes(packed) or b"")
    return "" if parts is None else address_block(unpack_addresses(parts[1]))


def unpack_bytes(packed: bytes) -> bytes | None:
    """Return the bytes object that a MessagePack message consists of; None for any other message.

    The bounds exclude every container, so a short message cannot make the parser reserve memory or recurse.
    """
    try:
        value = msgpack.unpackb(packed, **NO_CONTAINERS)
    except (ValueError, msgpack.UnpackException):
        return None
    return value if isinstance(value, bytes) else None


def entries_in(found: Any) -> Iterator[tuple[str, bytes]]:
    """Yield the subkeys and values of a look-up of members; nothing if there are none."""
    values = found.value if found is not None else {}
    if isinstance(values, Mapping):
        yield from ((str(subkey), item.value) for subkey, item in values.items())


class StoredRun(NamedTuple):
    """A run in a local storage: its number of shards, and its members counted, `NUM_MEMBERS_COUNTED` per bucket."""

    num_shards: int
    num_members: int


def count_stored_runs(storage: Any, *, guard: PeerGuard) -> dict[str, StoredRun]:
    """Return the runs with members in a local storage, the run with the most members first.

    `EntryValidator` checked the members' signatures. With this order a run hides another only with more identities. The
    number of shards is the maximum over some members, so that a member that claims fewer cannot hide the others.
    """
    buckets = [stored.value for _, stored in storage.items() if isinstance(stored.value, DictionaryDHTValue)]
    runs: dict[str, StoredRun] = {}
    for subkey, (packed, _) in itertools.chain(
        *(itertools.islice(one.items(), NUM_MEMBERS_COUNTED) for one in buckets)
    ):
        with guard.work_for(str(subkey), Place.DIRECTORY):
            if (parts := unverified(unpack_bytes(packed) or b"")) is not None:
                run, payload = parts
                num_shards, num_members = runs.get(run, StoredRun(1, 0))
                runs[run] = StoredRun(max(num_shards, num_shards_of(payload)), num_members + 1)
    return dict(sorted(runs.items(), key=lambda item: (-item[1].num_members, item[0])))
