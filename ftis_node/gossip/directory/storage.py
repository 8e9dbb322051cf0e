"""The entries that this node stores for other nodes, and hivemind's form of a run's members on the wire.

hivemind lets a rejected older value shorten the life of the held one, and it bounds no dictionary. Here an older entry
changes nothing, and a bucket decides at each store which member leaves.

Identities cost nothing, but addresses do (Sybil attack). So if space runs out, the address block with the most entries
loses its newest entries first. A member that claims foreign addresses gains little, because peers cannot dial it.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgpack

from ftis_node.gossip.directory.entries import num_shards_of, unpack_addresses, unverified
from ftis_node.gossip.p2pd.hivemind_bindings import DHTLocalStorage, DictionaryDHTValue, MSGPackSerializer
from ftis_node.records.addresses import block_of

Key = TypeVar("Key")

MAX_MEMBERS_PER_BUCKET = 256  # with 512-byte entries a reply of 16 buckets stays below 3 MiB
MAX_MEMBERS_READ = 64  # of a bucket: random ones, chosen before their signatures are verified
MAX_STORED_KEYS = 16384
NUM_MEMBERS_COUNTED = 64  # members in each bucket whose number of shards is taken into account
NO_CONTAINERS = {"max_str_len": 0, "max_array_len": 0, "max_map_len": 0, "max_ext_len": 0}  # of msgpack.unpackb
ONE_MEMBER = {"max_array_len": 3, "max_map_len": 0, "max_ext_len": 0}
DICTIONARY = MSGPackSerializer._ext_types[DictionaryDHTValue]


def address_block(addresses: Iterable[str]) -> str:
    """Return the address block of a peer: that of its first public address, else of its first address.

    A peer behind a relay is in the relay's block.
    """
    blocks = sorted(filter(None, map(block_of, addresses)), key=lambda block: not block.is_public)
    return blocks[0].name if blocks else ""


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


class Claims(NamedTuple):
    """What a stored entry says of its author, read once: the address block, and the run with its number of shards."""

    block: str
    run: str
    num_shards: int


class MemberBucket(DictionaryDHTValue):  # type: ignore[misc]
    """Members of a run by peer id: the newest entry of each, and at most `MAX_MEMBERS_PER_BUCKET`."""

    def __init__(self) -> None:
        super().__init__()
        self._claims: dict[str, Claims] = {}

    def store(self, key: str, value: bytes, expiration_time: float) -> bool:
        """Store a packed entry; return whether the bucket then has it."""
        if (held := self.get(key)) is not None and held.expiration_time >= expiration_time:
            return bool(held == (value, expiration_time))
        if not super().store(key, value, expiration_time):
            return False
        self._claims[key] = _claims(value)
        if len(self._claims) > MAX_MEMBERS_PER_BUCKET:
            self._claims = {subkey: self._claims[subkey] for subkey, _ in self.items()}  # without expired ones
            blocks = {subkey: claims.block for subkey, claims in self._claims.items()}
            for evicted in choose_evicted(blocks, room=MAX_MEMBERS_PER_BUCKET):
                del self[evicted], self._claims[evicted]
        return key in self.data

    def claims(self) -> Iterator[Claims]:
        """Yield what the first `NUM_MEMBERS_COUNTED` members claim."""
        for subkey, _ in itertools.islice(self.items(), NUM_MEMBERS_COUNTED):
            yield self._claims[subkey]

    @classmethod
    def unpackb(cls, raw: bytes) -> MemberBucket:
        """Return a bucket of at most `MAX_MEMBERS_READ` members of a peer's answer. Raises ValueError."""
        bucket, members = cls(), list(itertools.islice(_members_in(raw), MAX_MEMBERS_PER_BUCKET))
        for member in random.sample(members, min(len(members), MAX_MEMBERS_READ)):  # nosec B311: it is no secret
            bucket.store(*member)
        return bucket


class DirectorySerializer(MSGPackSerializer):  # type: ignore[misc]
    """hivemind's serializer, which reads a dictionary as a `MemberBucket`."""

    _ext_types = {**MSGPackSerializer._ext_types, MemberBucket: DICTIONARY}
    _ext_type_codes = {DICTIONARY: MemberBucket}


class EntryStorage(DHTLocalStorage):  # type: ignore[misc]
    """hivemind's local storage, in which an older entry neither replaces a newer one nor ends it."""

    def __init__(self) -> None:
        super().__init__(maxsize=MAX_STORED_KEYS)

    def store(self, key: Any, value: Any, expiration_time: float, subkey: str | None = None) -> bool:
        if subkey is not None:
            return self.store_subkey(key, subkey, value, expiration_time)
        if (held := self.get(key)) is not None and held.expiration_time >= expiration_time:
            return bool(held == (value, expiration_time))
        return bool(super().store(key, value, expiration_time))

    def store_subkey(self, key: Any, subkey: str, value: bytes, expiration_time: float) -> bool:
        held = self.get(key)
        bucket = held.value if held is not None and isinstance(held.value, MemberBucket) else MemberBucket()
        if not bucket.store(subkey, value, expiration_time):
            return False
        self.store(key, bucket, expiration_time)  # refused unless the bucket now lasts longer
        return True


def _claims(packed: bytes) -> Claims:
    parts = unverified(unpack_bytes(packed) or b"")
    if parts is None:
        return Claims("", "", 1)
    run, payload = parts
    return Claims(address_block(unpack_addresses(payload)), run, num_shards_of(payload))


def unpack_bytes(packed: bytes) -> bytes | None:
    """Return the bytes object that a MessagePack message consists of; None for any other message.

    The bounds exclude every container, so a short message cannot make the parser reserve memory or recurse.
    """
    try:
        value = msgpack.unpackb(packed, **NO_CONTAINERS)
    except (ValueError, msgpack.UnpackException):
        return None
    return value if isinstance(value, bytes) else None


def unpack_members(packed: bytes) -> Iterator[tuple[str, bytes, float]]:
    """Yield the peer id, the packed entry and the expiry of each member in hivemind's form of a whole dictionary.

    Nothing of an invalid message, and nothing behind the first invalid member.
    """
    try:
        whole = msgpack.unpackb(packed, max_array_len=0, max_map_len=0)
        if isinstance(whole, msgpack.ExtType) and whole.code == DICTIONARY:
            yield from _members_in(whole.data)
    except (ValueError, msgpack.UnpackException):
        return


def _members_in(raw: bytes) -> Iterator[tuple[str, bytes, float]]:
    """Yield the members in [largest size, latest expiry, [[peer id, packed entry, expiry], ...]]."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(raw) + 1, **ONE_MEMBER)
    unpacker.feed(raw)
    if unpacker.read_array_header() != 3:
        raise ValueError("no dictionary of hivemind")
    unpacker.skip()
    unpacker.skip()
    for _ in range(unpacker.read_array_header()):
        match unpacker.unpack():
            case [str() as peer_id, bytes() as entry, float() as expires_at]:
                yield peer_id, entry, expires_at
            case other:
                raise ValueError(f"no member: {type(other).__name__}")


def entries_in(found: Any) -> Iterator[tuple[str, float, bytes]]:
    """Yield the subkey ("" without one), the expiry and the value of each entry in hivemind's result for a key."""
    if found is None:
        return
    if isinstance(found.value, bytes):
        yield "", found.expiration_time, found.value
        return
    for subkey, item in found.value.items():
        yield subkey, item.expiration_time, item.value


class StoredRun(NamedTuple):
    """A run in a local storage: its number of shards, and its members counted, `NUM_MEMBERS_COUNTED` per bucket."""

    num_shards: int
    num_members: int


def count_stored_runs(storage: Any) -> dict[str, StoredRun]:
    """Return the runs with members in a local storage, the run with the most members first.

    `EntryValidator` checked the members' signatures. With this order a run hides another only with more identities. The
    number of shards is the maximum over some members, so that a member that claims fewer cannot hide the others.
    """
    runs: dict[str, StoredRun] = {}
    for bucket in (stored.value for _, stored in storage.items() if isinstance(stored.value, MemberBucket)):
        for _, run, num_shards in bucket.claims():
            most_shards, num_members = runs.get(run, StoredRun(1, 0))
            runs[run] = StoredRun(max(most_shards, num_shards), num_members + 1)
    runs.pop("", None)  # of entries that are malformed
    return dict(sorted(runs.items(), key=lambda item: (-item[1].num_members, item[0])))
