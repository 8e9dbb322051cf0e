"""The directory's door: whoever stores or reads an entry believes its owner alone."""

from __future__ import annotations

import struct
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ftis_node.gossip.bindings import DHTID, DHTRecord, DictionaryDHTValue, MSGPackSerializer, dht_pb2
from ftis_node.gossip.door import (
    MAX_KEYS_PER_FIND,
    MAX_KEYS_PER_STORE,
    MAX_MEMBERS_PER_BUCKET,
    EntryValidator,
    RequestBounds,
)
from ftis_node.gossip.entries import EntryKind, pack_addresses, seal, unpack_addresses, unseal
from ftis_node.gossip.names import NUM_MEMBER_BUCKETS, bucket_key, bucket_of, check_run_id, record_key
from ftis_node.records.identity import Identity

OWNER, OTHER = Identity.from_seed(bytes(32)), Identity.from_seed(bytes([1]) * 32)
VALIDATOR = EntryValidator(max_record_bytes=2048, max_ttl_s=600)
SOON = time.time() + 300


def _record(raw: bytes, *, key: str, subkey: str | None = None, expires_at: float = SOON) -> DHTRecord:
    return DHTRecord(
        key=DHTID.generate(source=key).to_bytes(),
        subkey=MSGPackSerializer.dumps(subkey),
        value=MSGPackSerializer.dumps(raw),
        expiration_time=expires_at,
    )


def _sealed(
    identity: Identity = OWNER, kind: EntryKind = EntryKind.RECORD, payload: bytes = b"x", **changes: Any
) -> bytes:
    return seal(identity, kind, changes.get("run_id", "r"), payload, expires_at=changes.get("expires_at", SOON))


OWNERS_KEY = record_key("r", OWNER.peer_id)
OWNERS_BUCKET = bucket_key("r", bucket_of(OWNER.peer_id))


def test_the_owners_entries_pass() -> None:
    assert VALIDATOR.validate(_record(_sealed(), key=OWNERS_KEY))
    assert VALIDATOR.validate(_record(_sealed(payload=bytes(2048)), key=OWNERS_KEY))
    member = _sealed(kind=EntryKind.MEMBER)
    assert VALIDATOR.validate(_record(member, key=OWNERS_BUCKET, subkey=OWNER.peer_id))


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(_record(_sealed(OTHER), key=OWNERS_KEY), id="signed by another"),
        pytest.param(_record(_sealed(run_id="s"), key=OWNERS_KEY), id="of another run"),
        pytest.param(_record(_sealed(), key=OWNERS_KEY, subkey="sub"), id="a subkey where none belongs"),
        pytest.param(_record(_sealed(), key=OWNERS_KEY, expires_at=SOON + 1), id="replayed with a later expiry"),
        pytest.param(
            _record(_sealed(expires_at=SOON + 3600), key=OWNERS_KEY, expires_at=SOON + 3600), id="expires too late"
        ),
        pytest.param(
            _record(_sealed(expires_at=float("nan")), key=OWNERS_KEY, expires_at=float("nan")), id="expires never"
        ),
        pytest.param(_record(_sealed(payload=bytes(2049)), key=OWNERS_KEY), id="too large"),
        pytest.param(
            _record(_sealed(kind=EntryKind.MEMBER, payload=bytes(513)), key=OWNERS_BUCKET, subkey=OWNER.peer_id),
            id="too large for a bucket",
        ),
        pytest.param(
            _record(_sealed(OTHER, EntryKind.MEMBER), key=OWNERS_BUCKET, subkey=OTHER.peer_id), id="in another's bucket"
        ),
        pytest.param(
            _record(_sealed(kind=EntryKind.MEMBER), key=OWNERS_BUCKET, subkey=OTHER.peer_id), id="in another's place"
        ),
        pytest.param(_record(b"", key=OWNERS_KEY), id="empty"),
        pytest.param(_record(_sealed()[:-2], key=OWNERS_KEY), id="cut"),
        pytest.param(_record(b"\x07" + _sealed()[1:], key=OWNERS_KEY), id="of an unknown kind"),
        pytest.param(replace(_record(b"", key=OWNERS_KEY), value=b"\xc1\xff"), id="no msgpack"),
        pytest.param(replace(_record(b"", key=OWNERS_KEY), value=b"\xdd\xff\xff\xff\xff"), id="a list of 4 G items"),
    ],
)
def test_nobody_elses_entry_passes(record: DHTRecord) -> None:
    assert not VALIDATOR.validate(record)


def test_every_byte_of_an_entry_is_covered_by_its_signature() -> None:
    raw = _sealed(payload=b"addresses")
    for at in range(len(raw)):
        forged = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        assert unseal(forged, max_record_bytes=2048) is None, f"byte {at}"


def test_a_run_id_longer_than_the_entry_is_refused() -> None:
    head = struct.Struct(">B38sd64sB")
    raw = head.pack(1, OWNER.peer, SOON, bytes(64), 255) + b"r"
    assert unseal(raw, max_record_bytes=2048) is None


@pytest.fixture
def bounds() -> RequestBounds:
    bounds = RequestBounds()
    bounds.storage = {}
    return bounds


async def test_requests_are_cut_not_refused(bounds: RequestBounds) -> None:
    find = dht_pb2.FindRequest(keys=[bytes(20)] * 1000)
    assert await bounds.validate_request(find)
    assert len(find.keys) == MAX_KEYS_PER_FIND
    many = 1000
    store = dht_pb2.StoreRequest(
        keys=[bytes(20)] * many,
        subkeys=[b""] * many,
        values=[b""] * many,
        expiration_time=[0.0] * many,
        in_cache=[False] * many,
    )
    assert await bounds.validate_request(store)
    columns = (store.keys, store.subkeys, store.values, store.expiration_time, store.in_cache)
    assert {len(column) for column in columns} == {MAX_KEYS_PER_STORE}
    assert await bounds.validate_request(dht_pb2.PingRequest())


async def test_a_bucket_does_not_outgrow_its_bound(bounds: RequestBounds) -> None:
    bucket, later = DictionaryDHTValue(), time.time() + 300  # the file may have been read long ago
    bounds.storage[DHTID(0)] = SimpleNamespace(value=bucket)
    for number in range(MAX_MEMBERS_PER_BUCKET + 10):
        assert await bounds.validate_request(dht_pb2.StoreRequest(keys=[bytes(20)]))
        bucket.store(f"peer {number}", b"", later + number)
    assert len(bucket) == MAX_MEMBERS_PER_BUCKET
    assert "peer 9" not in bucket
    assert "peer 10" in bucket


def test_addresses_fit_or_are_left_out() -> None:
    addresses = [f"/ip4/10.0.0.{number}/tcp/4001/p2p/{OWNER.peer_id}" for number in range(20)]
    packed = pack_addresses(addresses)
    assert len(packed) <= 512
    assert unpack_addresses(packed) == addresses[:6]


def test_members_spread_over_the_buckets() -> None:
    buckets = [bucket_of(Identity.from_seed(bytes([number]) * 32).peer_id) for number in range(200)]
    assert set(buckets) <= set(range(NUM_MEMBER_BUCKETS))
    assert len(set(buckets)) > NUM_MEMBER_BUCKETS / 2


@pytest.mark.parametrize("run_id", ["", "a/b", "a" * 65, "a b", "ä"])
def test_a_run_id_must_fit_into_names(run_id: str) -> None:
    with pytest.raises(ValueError, match="no run id"):
        check_run_id(run_id)
