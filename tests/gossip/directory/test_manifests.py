"""A run's manifest in the directory: no other content is accepted, and a joining node finds it by the run id."""

import time
import zlib

import pytest

from ftis_node.config.manifest import load_manifest, parse_canonical
from ftis_node.errors import ConfigError, NetworkError
from ftis_node.gossip import GossipCounters, GossipLimits
from ftis_node.gossip.directory.entries import MAX_MANIFEST_BYTES, EntryKind, pack_manifest, sign_entry, unpack_manifest
from ftis_node.gossip.directory.lookup import find_manifest
from ftis_node.gossip.directory.validators import EntryValidator
from ftis_node.gossip.p2pd.hivemind_bindings import DHTID, DHTRecord, MSGPackSerializer
from ftis_node.gossip.wire_format import manifest_key
from ftis_node.records.identity import Identity
from ftis_node.swarm.peer_guard import PeerGuard
from tests.gossip.helpers import settings
from tests.waiting import eventually

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
    expires_at = time.time() + 60
    record = DHTRecord(
        key=DHTID.generate(source=manifest_key(MANIFEST.run_id)).to_bytes(),
        subkey=MSGPackSerializer.dumps(None),
        value=MSGPackSerializer.dumps(
            sign_entry(PUBLISHER, EntryKind.MANIFEST, MANIFEST.run_id, payload, expires_at=expires_at)
        ),
        expiration_time=expires_at,
    )
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
