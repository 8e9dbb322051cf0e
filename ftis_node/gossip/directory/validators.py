"""The door of the directory: what this node stores for others, believes of others, and answers.

hivemind's DHT stores what it is told for as long as it is told, and answers requests of any size. Two of its own hooks
are used against that: a record validator (is this entry its owner's, in its place, in time?) and an authorizer, which
sees every request before it is worked on.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ftis_node.gossip.directory.entries import (
    EntryKind,
    claimed_addresses,
    has_valid_expiry,
    num_shards_of,
    run_of,
    verify_entry,
)
from ftis_node.gossip.directory.manifests import unpack_manifest
from ftis_node.gossip.directory.sybil_limits import address_block, choose_evicted
from ftis_node.gossip.p2pd.hivemind_bindings import (
    DHTID,
    AuthorizerBase,
    DHTRecord,
    DictionaryDHTValue,
    MSGPackSerializer,
    RecordValidatorBase,
    dht_pb2,
)
from ftis_node.swarm.peer_guard import UNPROVEN, PeerGuard, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ftis_node.gossip.directory.entries import DirectoryEntry

MAX_KEYS_PER_FIND = 16
MAX_KEYS_PER_STORE = 256
MAX_MEMBERS_PER_BUCKET = 256  # with 512-byte entries: a reply of 16 buckets stays under 3 MiB
MAX_STORED_KEYS = 16384
NUM_MEMBERS_COUNTED = 64  # members in each place of the directory by whose word runs have shards
MAX_NEAREST = 32  # nodes that a peer may name for a key; hivemind's name 20


class EntryValidator(RecordValidatorBase):  # type: ignore[misc]
    """Lets signed entries through, at the place and until the time that their owner signed."""

    def __init__(
        self,
        *,
        max_record_bytes: int,
        max_ttl_s: float,
        on_refusal: Callable[[], None] = lambda: None,
        guard: PeerGuard | None = None,
    ) -> None:
        """`on_refusal` is told of each record that does not pass."""
        self._guard = guard or PeerGuard()
        self._max_record_bytes = max_record_bytes
        self._max_ttl_s = max_ttl_s
        self._on_refusal = on_refusal

    def validate(self, record: DHTRecord) -> bool:
        """Whether a record may be stored, or believed when it is read."""
        is_good = False
        with self._guard.work_for(UNPROVEN, Place.DIRECTORY):  # hivemind calls this in tasks of its own
            is_good = self._is_good(record)
        if not is_good:
            self._on_refusal()
        return is_good

    def _is_good(self, record: DHTRecord) -> bool:
        entry = self._entry(record.value)
        if entry is None:
            return False
        with self._guard.work_for(entry.peer_id, Place.DIRECTORY):
            return self._belongs(entry, record)
        return False

    def _belongs(self, entry: DirectoryEntry, record: DHTRecord) -> bool:
        return (
            has_valid_expiry(entry, expires_at=record.expiration_time, now=time.time(), max_ttl_s=self._max_ttl_s)
            and bool(record.key == DHTID.generate(source=entry.key).to_bytes())
            and bool(record.subkey == MSGPackSerializer.dumps(entry.subkey))
            and (entry.kind is not EntryKind.MANIFEST or has_valid_manifest(entry))
        )

    def _entry(self, packed: bytes) -> DirectoryEntry | None:
        raw = unpack_bytes(packed)
        return None if raw is None else verify_entry(raw, max_record_bytes=self._max_record_bytes)


class RequestLimiter(AuthorizerBase):  # type: ignore[misc]
    """Cuts down requests that would cost too much work or memory. Signs nothing: entries are signed themselves.

    A node that serves refuses no request as a whole: hivemind takes a peer that refuses for a dead one, forgets it,
    meets it again, and hands it the same entries once more, without end. One that does not serve refuses them all, so
    that those who knew it forget it.
    """

    def __init__(self, own_node_id: bytes = b"", *, guard: PeerGuard | None = None) -> None:
        """`own_node_id` is this node's place in the DHT. A request or answer that cannot be cut down is refused."""
        self._guard = guard or PeerGuard()
        self._own_node_id = own_node_id
        self.storage: Any = None  # the node's local storage, once there is one
        self.is_serving = True

    async def validate_request(self, request: Any) -> bool:
        """Cuts a peer's request down to what is worked on."""
        with self._guard.work_for(UNPROVEN, Place.DIRECTORY):
            return self.is_serving and self._cut(request)
        return False

    def _cut(self, request: Any) -> bool:
        if isinstance(request, dht_pb2.FindRequest):
            del request.keys[MAX_KEYS_PER_FIND:]
            self._bound_buckets(request.keys)
        if isinstance(request, dht_pb2.StoreRequest):
            for column in (request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache):
                del column[MAX_KEYS_PER_STORE:]
            self._bound_buckets(request.keys)
        return True

    def _bound_buckets(self, keys: Iterable[bytes]) -> None:
        """Has buckets give up what is above their bound: before more is stored, and before they are read."""
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
        """Nothing to sign."""

    async def sign_response(self, response: Any, request: Any) -> None:
        """Nothing to sign."""

    async def validate_response(self, response: Any, request: Any) -> bool:
        """Cuts a peer's answer down; the values in it are checked one by one by `EntryValidator`.

        A peer may name this node among the nearest, out of malice or since this node told it no place (it does so while
        it does not serve). hivemind holds that to be impossible.
        """
        with self._guard.work_for(UNPROVEN, Place.DIRECTORY):
            return self._cut_answer(response)
        return False

    def _cut_answer(self, response: Any) -> bool:
        if isinstance(response, dht_pb2.FindResponse):
            for result in response.results:
                nearest = zip(result.nearest_node_ids, result.nearest_peer_ids, strict=False)
                others = [named for named in nearest if named[0] != self._own_node_id][:MAX_NEAREST]
                del result.nearest_node_ids[:], result.nearest_peer_ids[:]
                result.nearest_node_ids.extend(node_id for node_id, _ in others)
                result.nearest_peer_ids.extend(peer_id for _, peer_id in others)
        return True


@functools.lru_cache(maxsize=4096)
def _claimed_block(packed: bytes) -> str:
    """The address block that a stored member entry claims."""
    return address_block(claimed_addresses(unpack_bytes(packed) or b""))


def has_valid_manifest(entry: DirectoryEntry) -> bool:
    """Whether an entry has the manifest of the run that it names."""
    return unpack_manifest(entry.payload, run_id=entry.run_id) is not None


def unpack_bytes(packed: bytes) -> bytes | None:
    """The bytes object in a msgpack message, None where there is anything else. Never raises, unlike a full parser."""
    if packed[:1] == b"\xc4" and len(packed) >= 2 and len(packed) == 2 + packed[1]:
        return packed[2:]
    if packed[:1] == b"\xc5" and len(packed) >= 3 and len(packed) == 3 + int.from_bytes(packed[1:3], "big"):
        return packed[3:]
    return None


def entries_in(found: Any) -> Iterator[tuple[str, bytes]]:
    """Subkeys and values of what a look-up found under a key of members; none where it found nothing."""
    values = found.value if found is not None else {}
    if isinstance(values, Mapping):
        yield from ((str(subkey), item.value) for subkey, item in values.items())


def count_stored_runs(storage: Any, *, guard: PeerGuard) -> dict[str, int]:
    """Runs with members whose entries are in a local storage, and how many shards each has.

    That is the most that any of some members says: one that says fewer must not silence the other shards.
    """
    buckets = [stored.value for _, stored in storage.items() if isinstance(stored.value, DictionaryDHTValue)]
    runs: dict[str, int] = {}
    for subkey, (packed, _) in itertools.chain(
        *(itertools.islice(one.items(), NUM_MEMBERS_COUNTED) for one in buckets)
    ):
        with guard.work_for(str(subkey), Place.DIRECTORY):
            entry = unpack_bytes(packed) or b""
            if (run := run_of(entry)) is not None:
                runs[run] = max(runs.get(run, 1), num_shards_of(entry))
    return runs
