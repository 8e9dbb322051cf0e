"""Entries of the directory, also manifests: their validation, the clock skew that they show, the runs stored."""

import asyncio
import sys
import time
import zlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ftis_node.config.manifest import load_manifest, parse_canonical
from ftis_node.errors import ConfigError, NetworkError
from ftis_node.gossip import GossipCounters, GossipLimits
from ftis_node.gossip.directory import storage as storage_module
from ftis_node.gossip.directory.dht import Directory, majority_skew
from ftis_node.gossip.directory.entries import (
    MAX_MANIFEST_BYTES,
    EntryKind,
    num_shards_of,
    pack_manifest,
    pack_member,
    sign_entry,
    unpack_addresses,
    unpack_manifest,
    unverified,
    verify_entry,
)
from ftis_node.gossip.directory.lookup import find_manifest
from ftis_node.gossip.directory.storage import (
    MAX_MEMBERS_PER_BUCKET,
    MAX_MEMBERS_READ,
    DirectorySerializer,
    EntryStorage,
    MemberBucket,
    StoredRun,
)
from ftis_node.gossip.directory.validators import (
    MAX_KEYS_PER_FIND,
    MAX_KEYS_PER_STORE,
    EntryValidator,
    RequestLimiter,
    node_id_of,
)
from ftis_node.gossip.encryption import MAX_OVERHEAD_BYTES
from ftis_node.gossip.names import bucket_key, manifest_key, record_key
from ftis_node.gossip.p2pd.hivemind_bindings import DHTID, DHTRecord, MSGPackSerializer, dht_pb2
from ftis_node.gossip.session_parts import SessionParts
from ftis_node.records.identity import Identity
from ftis_node.swarm.peer_guard import PeerGuard
from ftis_node.swarm.topology import bucket_of
from tests.gossip.helpers import settings
from tests.waiting import eventually

OWNER, OTHER = Identity.from_seed(bytes(32)), Identity.from_seed(bytes([1]) * 32)
VALIDATOR = EntryValidator(GossipLimits(), counters=GossipCounters(), guard=PeerGuard())
SOON = time.time() + 300


OWNERS_KEY = record_key("r", OWNER.peer_id)
OWNERS_BUCKET = bucket_key("r", bucket_of(OWNER.peer_id))


def _record(raw: object, *, key: str = OWNERS_KEY, subkey: str | None = None, expires_at: float = SOON) -> DHTRecord:
    return DHTRecord(
        key=DHTID.generate(source=key).to_bytes(),
        subkey=MSGPackSerializer.dumps(subkey),
        value=MSGPackSerializer.dumps(raw),
        expiration_time=expires_at,
    )


def _sealed(
    identity: Identity = OWNER, kind: EntryKind = EntryKind.RECORD, payload: bytes = b"x", **changes: Any
) -> bytes:
    return sign_entry(identity, kind, changes.get("run_id", "r"), payload, expires_at=changes.get("expires_at", SOON))


def _packed_as(value: bytes) -> DHTRecord:
    return replace(_record(b""), value=value)


def _in_bucket(identity: Identity = OWNER, *, subkey: str = OWNER.peer_id, payload: bytes = b"x") -> DHTRecord:
    return _record(_sealed(identity, EntryKind.MEMBER, payload), key=OWNERS_BUCKET, subkey=subkey)


def test_entries_of_the_owner_are_accepted():
    for record in (_record(_sealed()), _record(_sealed(payload=bytes(2048))), _in_bucket()):
        assert VALIDATOR.validate(record)


NEVER = float("nan")
INVALID = {
    "signed by another": _record(_sealed(OTHER)), "of another run": _record(_sealed(run_id="s")),
    "an unexpected subkey": _record(_sealed(), subkey="sub"),
    "replayed with a later expiry": _record(_sealed(), expires_at=SOON + 1),
    "expires too late": _record(_sealed(expires_at=SOON + 3600), expires_at=SOON + 3600),
    "expires never": _record(_sealed(expires_at=NEVER), expires_at=NEVER),
    "too large": _record(_sealed(payload=bytes(2049))), "too large for a bucket": _in_bucket(payload=bytes(513)),
    "in another's bucket": _in_bucket(OTHER, subkey=OTHER.peer_id),
    "under another's subkey": _in_bucket(subkey=OTHER.peer_id), "empty": _record(b""),
    "truncated": _record(_sealed()[:-2]), "of an unknown kind": _record(b"\x07" + _sealed()[1:]),
    "no msgpack": _packed_as(b"\xc1\xff"), "a list of 4 G items": _packed_as(b"\xdd\xff\xff\xff\xff"),
    "4 GiB of bytes": _packed_as(b"\xc6\xff\xff\xff\xff"), "nested lists": _packed_as(b"\x91" * 5000),
    "an extension type": _packed_as(b"\xd4\x01\x00"),
    "a second value": _packed_as(MSGPackSerializer.dumps(_sealed()) + b"\xc0"),
    "a list of an entry": _record([_sealed()]),
}  # fmt: skip


@pytest.mark.parametrize("record", INVALID.values(), ids=INVALID)
def test_an_invalid_entry_or_one_of_another_peer_is_refused(record):
    assert not VALIDATOR.validate(record)


def test_every_byte_of_an_entry_is_covered_by_its_signature():
    raw = _sealed(payload=b"addresses")
    for at in range(len(raw)):
        forged = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        assert verify_entry(forged, max_record_bytes=2048) is None, f"byte {at}"


async def test_long_requests_are_truncated_not_refused():
    limiter, find = RequestLimiter(), dht_pb2.FindRequest(keys=[bytes(20)] * 1000)
    assert await limiter.validate_request(find)
    assert len(find.keys) == MAX_KEYS_PER_FIND
    columns = {"keys": bytes(20), "subkeys": b"\xc0", "values": b"", "expiration_time": 0.0, "in_cache": True}
    store = dht_pb2.StoreRequest(**{name: [value] * 1000 for name, value in columns.items()})
    assert await limiter.validate_request(store)
    assert {len(getattr(store, name)) for name in columns} == {MAX_KEYS_PER_STORE}
    assert not any(store.in_cache), "hivemind's cache has no bounds"
    assert await limiter.validate_request(dht_pb2.PingRequest())


async def test_an_answer_names_other_nodes_under_the_ids_of_their_peers():
    peers = [bytes([number]) * 38 for number in range(40)]
    invented = [(DHTID(number).to_bytes(), peers[0]) for number in range(20)]  # all nearest to a key, and one peer
    named = [*invented, *((node_id_of(peer), peer) for peer in peers)]
    limiter = RequestLimiter(node_id_of(peers[3]))
    result = dht_pb2.FindResult(
        nearest_node_ids=[node_id for node_id, _ in named],
        nearest_peer_ids=[peer for _, peer in named],
        expiration_time=float("inf"),  # ends hivemind's search
    )
    answer = dht_pb2.FindResponse(results=[result, result])
    assert await limiter.validate_response(answer, dht_pb2.FindRequest())
    for result in answer.results:
        assert list(result.nearest_peer_ids) == [*peers[:3], *peers[4:12]], "among the first 32"
        assert list(result.nearest_node_ids) == [node_id_of(peer) for peer in result.nearest_peer_ids]
        assert result.expiration_time == 0.0


async def test_an_error_of_hivemind_is_a_timeout_and_a_lost_p2pd_is_not(tmp_path):
    async def find_nearest_nodes(*_):
        raise AssertionError

    async def disconnected(*_, **__):
        raise ConnectionResetError

    node = SimpleNamespace(find_nearest_nodes=find_nearest_nodes, get_many=disconnected)
    directory = Directory(node, RequestLimiter(), SessionParts(settings=settings(tmp_path), identity=OWNER))
    with pytest.raises(TimeoutError, match="failed: AssertionError"):
        await directory._call(node.find_nearest_nodes())
    with pytest.raises(ConnectionResetError):
        await directory.get_manifest("r")  # the end of p2pd passes through


def _member(number: int, address: str) -> tuple[str, bytes]:
    identity = Identity.from_seed(number.to_bytes(32, "big"))
    raw = _sealed(identity, EntryKind.MEMBER, pack_member([f"{address}/p2p/{identity.peer_id}"], num_shards=1))
    return identity.peer_id, MSGPackSerializer.dumps(raw)


KEY = DHTID(0)


def _members_of(storage: EntryStorage) -> list[str]:
    return [peer_id for peer_id, _ in storage.get(KEY).value.items()]


def test_a_thousand_identities_in_one_network_displace_no_member():
    """Later expiry and renewals do not help them: the bucket keeps its limit and its earlier members."""
    storage, later = EntryStorage(), time.time() + 300  # SOON may have passed since the import
    honest = dict(_member(number, f"/ip4/8.8.{number}.8/tcp/1") for number in range(40))
    for peer_id, packed in honest.items():
        assert storage.store_subkey(KEY, peer_id, packed, later)
    crowd = [_member(1000 + number, f"/ip4/9.9.9.{number % 250}/tcp/{number + 1}") for number in range(1000)]
    kept = [storage.store_subkey(KEY, peer_id, packed, later + 300) for peer_id, packed in crowd]
    assert sum(kept) == MAX_MEMBERS_PER_BUCKET - len(honest)
    newcomer, packed = _member(41, "/ip4/1.1.1.1/tcp/1")
    assert storage.store_subkey(KEY, newcomer, packed, later)
    assert len(_members_of(storage)) == MAX_MEMBERS_PER_BUCKET
    assert {*honest, newcomer} <= set(_members_of(storage))


def test_a_full_bucket_parses_only_the_newcomer(monkeypatch):
    storage, later, parsed = EntryStorage(), time.time() + 300, []
    members = [_member(number, f"/ip4/8.{number // 250}.{number % 250}.8/tcp/1") for number in range(300)]
    monkeypatch.setattr(storage_module, "unpack_addresses", lambda raw: parsed.append(raw) or unpack_addresses(raw))
    for number, (peer_id, packed) in enumerate(members):
        assert storage.store_subkey(KEY, peer_id, packed, later + number) is (number < MAX_MEMBERS_PER_BUCKET)
    assert len(parsed) == len(members)
    assert _members_of(storage) == [peer_id for peer_id, _ in members[:MAX_MEMBERS_PER_BUCKET]]


def test_an_older_entry_does_not_end_a_newer_one(monkeypatch):
    storage, now = EntryStorage(), time.time()
    for subkey in (None, OWNER.peer_id):
        key = DHTID.generate(source=subkey)
        assert storage.store(key, b"new", now + 300, subkey=subkey)
        assert not storage.store(key, b"old", now + 6, subkey=subkey)
        assert storage.store(key, b"new", now + 300, subkey=subkey), "stored already"
        monkeypatch.setattr(sys.modules["hivemind.utils.timed_storage"], "get_dht_time", lambda: now + 10)
        held = storage.get(key).value
        assert (held.get(subkey).value if subkey else held) == b"new"
        monkeypatch.undo()


async def test_a_dictionary_counts_as_its_members_and_becomes_them():
    bucket, limiter = MemberBucket(), RequestLimiter()
    for number in range(200):
        bucket.store(f"member {number}", b"entry", SOON + 600)
    columns = {"keys": bytes(20), "subkeys": b"", "values": DirectorySerializer.dumps(bucket)}
    request = dht_pb2.StoreRequest(
        **{name: [value] * 99 for name, value in columns.items()}, expiration_time=[0.0] * 99, in_cache=[False] * 99
    )
    own = dht_pb2.StoreRequest.FromString(request.SerializeToString())
    assert await limiter.validate_request(request)
    await limiter.sign_request(own, None)  # hivemind hands over all that a node holds in one request
    assert request == own and len(own.keys) == len(own.in_cache) == MAX_KEYS_PER_STORE
    assert own.subkeys[0] == MSGPackSerializer.dumps("member 0") and own.values[0] == b"entry"
    assert set(own.expiration_time) == {SOON + 600}
    for invalid in (b"", b"\x93", b"\xc7\x02\x50\x93\xc0", b"\xd4\x50\xc0", MSGPackSerializer.dumps([1])):
        empty = dht_pb2.StoreRequest(keys=[bytes(20)], subkeys=[b""], values=[invalid], expiration_time=[0.0])
        assert await limiter.validate_request(empty)
        assert not empty.keys, "no value of it reaches hivemind's parser"


def test_a_reader_drops_only_the_invalid_members_of_a_bucket():
    """A reader whose clock is behind refuses the farthest expiry that the storing node accepts."""
    bucket, now = MemberBucket(), time.time()  # SOON may have passed since the import
    for identity, expires_at in ((OWNER, now + 300), (OTHER, now + 700)):
        raw = _sealed(identity, EntryKind.MEMBER, run_id=RUN, expires_at=expires_at)
        bucket.store(identity.peer_id, MSGPackSerializer.dumps(raw), expires_at)
    read = DirectorySerializer.loads(DirectorySerializer.dumps(bucket))
    key = DHTID.generate(source=bucket_key(RUN, bucket_of(OWNER.peer_id))).to_bytes()
    assert VALIDATOR.keep_valid(key, read)
    assert [peer_id for peer_id, _ in read.items()] == [OWNER.peer_id]
    assert not VALIDATOR.keep_valid(bytes(20), read), "an empty bucket hides no other node's"
    assert not VALIDATOR.keep_valid(bytes(20), 7)


def test_random_members_of_a_large_bucket_are_read():
    bucket = MemberBucket()
    for number in range(MAX_MEMBERS_PER_BUCKET):
        bucket.store(f"member {number}", b"", SOON + 600)
    packed = DirectorySerializer.dumps(bucket)
    reads = [frozenset(dict(DirectorySerializer.loads(packed).items())) for _ in range(3)]
    assert len(set(reads)) == 3 and {len(read) for read in reads} == {MAX_MEMBERS_READ}


async def test_a_configured_peer_stores_and_is_asked_and_other_tasks_run_meanwhile(tmp_path):
    """hivemind finds no node in time. The peer has more invented members than one look-up reads."""
    bucket, num_others = MemberBucket(), 0
    for number in range(MAX_MEMBERS_READ + 6):
        bucket.store(*_member(number, "x"), time.time() + 300)

    async def in_time(*_, **__):
        raise TimeoutError

    async def call_store(peer, keys, values, expiries, *, subkeys):
        return [peer == "peer" and bool(keys and values and expiries) and subkeys == [None]]

    async def call_find(peer, ids):
        return {key: (SimpleNamespace(value=bucket), {}) for key in ids}

    async def other():
        nonlocal num_others
        while True:
            num_others += 1
            await asyncio.sleep(0)

    protocol = SimpleNamespace(call_find=call_find, call_store=call_store)
    node = SimpleNamespace(get_many=in_time, store=in_time, protocol=protocol)
    directory = Directory(node, RequestLimiter(), SessionParts(settings=settings(tmp_path)))
    with pytest.raises(TimeoutError):
        await directory.members("r", [0])
    directory._answering = ["peer"]  # type: ignore[list-item]
    assert await directory.publish_record("r", b"record", ttl_s=60)
    task = asyncio.create_task(other())
    assert len(await directory.members("r", [0])) == MAX_MEMBERS_READ
    task.cancel()
    assert num_others >= MAX_MEMBERS_READ


def test_addresses_that_do_not_fit_are_omitted():
    assert len(unpack_addresses(b"/ip4/1.1.1.1/tcp/1\n" * 27)) == 6, "a node's own addresses name its peer"
    addresses = [f"/ip4/10.0.0.{number}/tcp/4001/p2p/{OWNER.peer_id}" for number in range(20)]
    packed = pack_member(addresses, num_shards=8)
    assert len(packed) <= 512 - MAX_OVERHEAD_BYTES
    assert unpack_addresses(packed) == addresses[:5]


@pytest.mark.parametrize(
    ("payload", "num_shards"),
    [
        (pack_member(["/ip4/1.2.3.4/tcp/1"], num_shards=16), 16), (b"/ip4/1.2.3.4/tcp/1\n", 1), (b"shards=65\n", 1),
        (b"shards=0\n", 1), (b"shards=" + b"9" * 500, 1), (b"", 1),
    ],
)  # fmt: skip
def test_a_member_entry_contains_the_number_of_shards(payload, num_shards):
    assert unverified(sign_entry(OWNER, EntryKind.MEMBER, "r", payload, expires_at=1.0)) == ("r", payload)
    assert num_shards_of(payload) == num_shards


HOURS = 3 * 3600.0


@pytest.mark.parametrize(
    ("skews_s", "expected"),
    [
        ([], None), ([-HOURS], None), ([0.1, -HOURS], 0.1), ([-HOURS, -HOURS + 1], -HOURS + 1),
        ([0.0, -HOURS, -HOURS], -HOURS), ([0.0, 0.2, -HOURS, HOURS], 0.2),
    ],
)  # fmt: skip
def test_the_skew_is_that_of_most_peers(skews_s, expected):
    assert majority_skew(skews_s) == expected


def test_a_peer_with_another_clock_is_named_once(caplog):
    directory = Directory.__new__(Directory)  # without a network
    directory._skews_s, directory._named = {}, {}  # type: ignore[assignment]
    right_s = time.time() - time.monotonic()
    directory._note_clock("late", right_s - HOURS)
    directory._note_clock("late", right_s - HOURS)
    directory._note_clock("right", right_s)
    directory._note_clock("later", right_s - 2 * HOURS)
    assert [record.getMessage() for record in caplog.records] == [
        "the clock of peer late is -10800 s off this machine's: one of the two is wrong",
        "the clock of peer later is -21600 s off this machine's: most peers disagree with it",
    ]


RUN, OTHER_RUN = "ab" * 16, "cd" * 16


def _packed(run_id: str, num_shards: int, *, later: float) -> bytes:
    payload = pack_member([], num_shards=num_shards)
    raw = sign_entry(Identity.generate(), EntryKind.MEMBER, run_id, payload, expires_at=later)
    return b"\xc5" + len(raw).to_bytes(2, "big") + raw


def test_a_member_that_claims_fewer_shards_removes_none(monkeypatch):
    storage, later = [], time.time() + 60
    for run_id, claims in ((RUN, (1, 8)), (RUN, (8, 1)), (RUN, (1,)), (OTHER_RUN, (2,))):
        bucket = MemberBucket()
        for number, num_shards in enumerate(claims):
            bucket.store(f"member-{number}", _packed(run_id, num_shards, later=later), later)
        storage.append((DHTID.generate(), SimpleNamespace(value=bucket)))
    directory = object.__new__(Directory)
    directory._node = SimpleNamespace(protocol=SimpleNamespace(storage=dict(storage)))
    monkeypatch.setattr(storage_module, "unpack_bytes", None)  # each entry was read when it was stored
    assert directory.stored_runs() == {RUN: StoredRun(8, 5), OTHER_RUN: StoredRun(2, 1)}


MANIFEST = load_manifest("gsm8k-ftis")
PACKED = pack_manifest(MANIFEST.canonical())
PUBLISHER = Identity.from_seed(bytes(32))


def test_a_manifest_is_read_unchanged_and_matches_the_run_id():
    canonical = unpack_manifest(PACKED, run_id=MANIFEST.run_id)
    assert canonical == MANIFEST.canonical()
    assert parse_canonical(canonical, source="test") == MANIFEST
    assert len(PACKED) < 1024


@pytest.mark.parametrize(
    "payload",
    [
        pack_manifest(load_manifest("rg-swarm").canonical()),  # of another run
        PACKED[:-1],
        PACKED + b"x",
        b"",
        b"invalid",
        zlib.compress(MANIFEST.canonical() + bytes(200 * MAX_MANIFEST_BYTES)),  # a decompression bomb
    ],
)
def test_other_content_is_refused(payload):
    assert unpack_manifest(payload, run_id=MANIFEST.run_id) is None


@pytest.mark.parametrize(("payload", "is_valid"), [(PACKED, True), (PACKED[:-1], False)])
def test_the_directory_stores_a_manifest_only_under_its_run_id(payload, is_valid):
    later = time.time() + 60
    entry = sign_entry(PUBLISHER, EntryKind.MANIFEST, MANIFEST.run_id, payload, expires_at=later)
    record = _record(entry, key=manifest_key(MANIFEST.run_id), expires_at=later)
    assert EntryValidator(GossipLimits(), counters=GossipCounters(), guard=PeerGuard()).validate(record) is is_valid


def test_the_error_for_another_schema_version_names_it():
    canonical = MANIFEST.canonical().replace(b'"schema_version":1', b'"schema_version":2')
    with pytest.raises(ConfigError, match="made by another version of ftis-node"):
        parse_canonical(canonical, source="run x")


@pytest.mark.timeout(120)
async def test_a_joining_node_finds_the_manifest_by_the_run_id(start, tmp_path):
    peers = tuple((await start(run_id=None)).addresses)
    member = await start(peers=peers, identity=PUBLISHER, run_id=MANIFEST.run_id)
    await eventually(lambda: member.publish_manifest(MANIFEST.canonical(), ttl_s=60))
    joining = settings(tmp_path / "l", peers=peers)
    assert await find_manifest(joining, run_id=MANIFEST.run_id, timeout_s=30) == MANIFEST.canonical()
    with pytest.raises(NetworkError, match="no manifest of run 0000"):
        await find_manifest(joining, run_id="0" * 32, timeout_s=1)
