"""Entries of the directory, also manifests: their validation, the clock skew that they show, the runs stored."""

import time
import zlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ftis_node.config.manifest import load_manifest, parse_canonical
from ftis_node.errors import ConfigError, NetworkError
from ftis_node.gossip import GossipCounters, GossipLimits
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
from ftis_node.gossip.directory.validators import (
    MAX_KEYS_PER_FIND,
    MAX_KEYS_PER_STORE,
    MAX_MEMBERS_PER_BUCKET,
    EntryValidator,
    RequestLimiter,
    StoredRun,
)
from ftis_node.gossip.encryption import MAX_OVERHEAD_BYTES
from ftis_node.gossip.names import bucket_key, check_run_id, manifest_key, record_key
from ftis_node.gossip.p2pd.hivemind_bindings import DHTID, DHTRecord, DictionaryDHTValue, MSGPackSerializer, dht_pb2
from ftis_node.gossip.p2pd.session_parts import SessionParts
from ftis_node.records.identity import Identity
from ftis_node.swarm.peer_guard import PeerGuard
from ftis_node.swarm.topology import bucket_of
from tests.gossip.helpers import settings
from tests.waiting import eventually

OWNER, OTHER = Identity.from_seed(bytes(32)), Identity.from_seed(bytes([1]) * 32)
VALIDATOR = EntryValidator(GossipLimits(), counters=GossipCounters(), guard=PeerGuard())
SOON = time.time() + 300
OWN_ID = 7  # the DHT id of the node that validates


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
    "signed by another": _record(_sealed(OTHER)),
    "of another run": _record(_sealed(run_id="s")),
    "an unexpected subkey": _record(_sealed(), subkey="sub"),
    "replayed with a later expiry": _record(_sealed(), expires_at=SOON + 1),
    "expires too late": _record(_sealed(expires_at=SOON + 3600), expires_at=SOON + 3600),
    "expires never": _record(_sealed(expires_at=NEVER), expires_at=NEVER),
    "too large": _record(_sealed(payload=bytes(2049))),
    "too large for a bucket": _in_bucket(payload=bytes(513)),
    "in another's bucket": _in_bucket(OTHER, subkey=OTHER.peer_id),
    "under another's subkey": _in_bucket(subkey=OTHER.peer_id),
    "empty": _record(b""),
    "truncated": _record(_sealed()[:-2]),
    "of an unknown kind": _record(b"\x07" + _sealed()[1:]),
    "no msgpack": _packed_as(b"\xc1\xff"),
    "a list of 4 G items": _packed_as(b"\xdd\xff\xff\xff\xff"),
    "4 GiB of bytes": _packed_as(b"\xc6\xff\xff\xff\xff"),
    "nested lists": _packed_as(b"\x91" * 5000),
    "an extension type": _packed_as(b"\xd4\x01\x00"),
    "a second value": _packed_as(MSGPackSerializer.dumps(_sealed()) + b"\xc0"),
    "a list of an entry": _record([_sealed()]),
}


@pytest.mark.parametrize("record", INVALID.values(), ids=INVALID)
def test_an_invalid_entry_or_one_of_another_peer_is_refused(record):
    assert not VALIDATOR.validate(record)


def test_every_byte_of_an_entry_is_covered_by_its_signature():
    raw = _sealed(payload=b"addresses")
    for at in range(len(raw)):
        forged = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        assert verify_entry(forged, max_record_bytes=2048) is None, f"byte {at}"


@pytest.fixture
def limiter():
    limiter = RequestLimiter(DHTID(OWN_ID).to_bytes())
    limiter.storage = {}
    return limiter


async def test_long_requests_are_truncated_not_refused(limiter):
    find = dht_pb2.FindRequest(keys=[bytes(20)] * 1000)
    assert await limiter.validate_request(find)
    assert len(find.keys) == MAX_KEYS_PER_FIND
    columns = {"keys": bytes(20), "subkeys": b"", "values": b"", "expiration_time": 0.0, "in_cache": False}
    store = dht_pb2.StoreRequest(**{name: [value] * 1000 for name, value in columns.items()})
    assert await limiter.validate_request(store)
    assert {len(getattr(store, name)) for name in columns} == {MAX_KEYS_PER_STORE}
    assert await limiter.validate_request(dht_pb2.PingRequest())


async def test_this_node_and_excess_neighbors_are_removed_from_an_answer(limiter):
    neighbors = [DHTID(number).to_bytes() for number in (OWN_ID, 8, 9, OWN_ID, *range(100, 200))]
    answer = dht_pb2.FindResponse(
        results=[dht_pb2.FindResult(nearest_node_ids=neighbors, nearest_peer_ids=[one[-1:] for one in neighbors])] * 2
    )
    assert await limiter.validate_response(answer, dht_pb2.FindRequest())
    for result in answer.results:
        assert list(result.nearest_node_ids) == [DHTID(number).to_bytes() for number in (8, 9, *range(100, 130))]
        assert list(result.nearest_peer_ids) == [one[-1:] for one in result.nearest_node_ids], "the lists still agree"


async def test_an_error_of_hivemind_is_a_timeout_and_a_lost_p2pd_is_not(tmp_path):
    async def find_nearest_nodes(*_):
        raise AssertionError

    async def disconnected(*_, **__):
        raise ConnectionResetError

    node = SimpleNamespace(find_nearest_nodes=find_nearest_nodes, get=disconnected)
    directory = Directory(node, RequestLimiter(), SessionParts(settings=settings(tmp_path), identity=OWNER))
    with pytest.raises(TimeoutError, match="failed: AssertionError"):
        await directory._call(node.find_nearest_nodes())
    with pytest.raises(ConnectionResetError):
        await directory.get_manifest("r")  # the end of p2pd passes through


def _member(number: int, address: str) -> tuple[str, bytes]:
    identity = Identity.from_seed(number.to_bytes(32, "big"))
    raw = _sealed(identity, EntryKind.MEMBER, pack_member([f"{address}/p2p/{identity.peer_id}"], num_shards=1))
    return identity.peer_id, MSGPackSerializer.dumps(raw)


async def test_a_thousand_identities_in_one_network_displace_no_member(limiter):
    """Later expiry and renewals do not help them: the bucket keeps its limit and its earlier members."""
    bucket, later = DictionaryDHTValue(), time.time() + 300  # SOON may have passed since the import
    limiter.storage[DHTID(0)] = SimpleNamespace(value=bucket)
    store, find = dht_pb2.StoreRequest(keys=[bytes(20)]), dht_pb2.FindRequest(keys=[bytes(20)])
    honest = dict(_member(number, f"/ip4/8.8.{number}.8/tcp/1") for number in range(40))
    for peer_id, packed in honest.items():
        bucket.store(peer_id, packed, later)
    crowd = [_member(1000 + number, f"/ip4/9.9.9.{number % 250}/tcp/{number + 1}") for number in range(1000)]
    for peer_id, packed in crowd:
        assert await limiter.validate_request(store)
        bucket.store(peer_id, packed, later + 300)
    newcomer, packed = _member(41, "/ip4/1.1.1.1/tcp/1")
    bucket.store(newcomer, packed, later)
    assert await limiter.validate_request(find)
    assert len(bucket) == MAX_MEMBERS_PER_BUCKET
    assert all(peer_id in bucket for peer_id in [*honest, newcomer])


async def test_a_full_bucket_of_different_networks_keeps_its_first_members(limiter):
    bucket, later = DictionaryDHTValue(), time.time() + 300
    limiter.storage[DHTID(0)] = SimpleNamespace(value=bucket)
    members = [_member(number, f"/ip4/8.{number // 250}.{number % 250}.8/tcp/1") for number in range(300)]
    for number, (peer_id, packed) in enumerate(members):
        bucket.store(peer_id, packed, later + number)
        assert await limiter.validate_request(dht_pb2.StoreRequest(keys=[bytes(20)]))
    assert [peer_id for peer_id, _ in bucket.items()] == [peer_id for peer_id, _ in members[:MAX_MEMBERS_PER_BUCKET]]


def test_addresses_that_do_not_fit_are_omitted():
    addresses = [f"/ip4/10.0.0.{number}/tcp/4001/p2p/{OWNER.peer_id}" for number in range(20)]
    packed = pack_member(addresses, num_shards=8)
    assert len(packed) <= 512 - MAX_OVERHEAD_BYTES
    assert unpack_addresses(packed) == addresses[:5]


@pytest.mark.parametrize("run_id", ["", "a/b", "a" * 65, "a b", "ä"])
def test_an_invalid_run_id_is_refused(run_id):
    with pytest.raises(ValueError, match="is not a run id"):
        check_run_id(run_id)


@pytest.mark.parametrize(
    ("payload", "num_shards"),
    [
        (pack_member(["/ip4/1.2.3.4/tcp/1"], num_shards=16), 16),
        (b"/ip4/1.2.3.4/tcp/1\n", 1),
        (b"shards=65\n", 1),
        (b"shards=0\n", 1),
        (b"shards=" + b"9" * 500, 1),
        (b"", 1),
    ],
)
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
