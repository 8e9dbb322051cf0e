"""The key file, the peer id, and signatures that are valid in one domain only."""

import stat
from dataclasses import replace

import pytest

from ftis_node.errors import ConfigError, RecordError
from ftis_node.gossip.encryption import MAX_OVERHEAD_BYTES
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.bounds import MAX_GROUP_SOURCES, MAX_PASS_RATES, MAX_REASON_BYTES, MAX_REFUSED_SENDERS
from ftis_node.records.codec import unpack_any
from ftis_node.records.envelope import (
    MAX_PEER_RECORD_BYTES,
    PeerRecord,
    open_peer_record,
    seal_group,
    seal_peer_record,
)
from ftis_node.records.identity import ENVELOPE_DOMAIN, PEER_DOMAIN, Identity, peer_id_from_text, peer_id_text, verify
from ftis_node.records.peer_messages import PeerStats, open_offer, seal_offer
from tests.conftest import make_group
from tests.records.test_bounds import RECORD
from tests.records.test_codec import refuses
from tests.records.test_weights import make_offer
from tests.records.wire_example import sign_peer_info

# From RFC 8032, section 7.1, test 1: the public key of this seed.
RFC_SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
RFC_PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")


def test_the_peer_id_contains_the_public_key():
    identity = Identity.from_seed(RFC_SEED)
    assert identity.peer.endswith(RFC_PUBLIC)
    assert identity.peer_id.startswith("12D3Koo")
    assert peer_id_from_text(identity.peer_id) == identity.peer
    assert peer_id_text(identity.peer) == identity.peer_id


def test_the_key_is_created_once_and_readable_by_its_owner_only(tmp_path):
    path = tmp_path / "identity.key"
    first = Identity.load_or_create(path)
    assert (stat.S_IMODE(path.stat().st_mode), Identity.load_or_create(path)) == (0o600, first)


def test_a_damaged_key_or_one_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "identity.key"
    identity = Identity.load_or_create(path)
    text = path.read_text()
    path.write_text(("0" if text[0] != "0" else "1") + text[1:])
    with pytest.raises(ConfigError, match="damaged"):
        Identity.load(path)
    path.write_text(f"{identity.seed.hex()}\n")
    assert Identity.load_or_create(path) == identity, "a file with the seed alone"
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Identity.load_or_create(path)
    path.chmod(0o600)
    path.write_text("not hex")
    with pytest.raises(ConfigError, match="damaged"):
        Identity.load_or_create(path)


def test_a_signature_is_valid_in_its_domain_only(identity):
    signature = identity.sign(ENVELOPE_DOMAIN, b"body")
    assert verify(identity.peer, ENVELOPE_DOMAIN, b"body", signature)
    assert not verify(identity.peer, PEER_DOMAIN, b"body", signature)
    assert not verify(identity.peer, ENVELOPE_DOMAIN, b"another", signature)
    assert not verify(b"short", ENVELOPE_DOMAIN, b"body", signature)
    assert not verify(identity.peer, ENVELOPE_DOMAIN, b"body", b"")


def _record(identity: Identity) -> PeerRecord:
    of_model = {"name": "alice", "model": "Qwen/Qwen2.5-3B", "parameters": 3_000_000_000, "tokens_per_s": 1500.0}
    numbers = {"last_number": 7, "policy_version": 3, "created_at": 1_700_000_000.125}
    return replace(RECORD, peer_id=identity.peer_id, **of_model, **numbers)


def test_a_directory_record_is_read_unchanged_and_bound_to_its_signer(identity):
    record = _record(identity)
    data = seal_peer_record(record, identity)
    assert len(data) < 2048
    assert open_peer_record(data) == record
    with refuses("signature"):
        open_peer_record(data[:-1] + bytes([data[-1] ^ 1]))
    with refuses("size"):
        open_peer_record(b"x" * 2049)


def test_names_above_their_bounds_are_clipped_between_two_characters(identity):
    record = replace(_record(identity), name="n" + "я" * 40, model="m" + "界" * 60)
    read = open_peer_record(seal_peer_record(record, identity))
    assert (read.name, read.model) == ("n" + "я" * 31, "m" + "界" * 42)
    group = make_group(identity, model=record.model)
    assert unpack_any(seal_group(group, identity).body).model == read.model
    offer = replace(make_offer(identity), model=record.model)
    assert open_offer(seal_offer(offer, identity)).model == read.model


def test_the_largest_record_with_measurements_fits_and_is_read_unchanged():
    identity = Identity.generate()
    others = [Identity.generate().peer_id for _ in range(MAX_GROUP_SOURCES)]
    stats = PeerStats(
        step=10**9,
        groups_per_minute=12.5,
        refused_groups=10**9,
        pass_rates=tuple((10**9 + step, 0.5) for step in range(MAX_PASS_RATES)),
        sources=tuple((peer_id, 10**6) for peer_id in others),
        trained_groups=10**9,
    )
    record = replace(_record(identity), name="n" * 64, model="m" * 128, domain="d" * 512, stats=stats)
    assert open_peer_record(seal_peer_record(record, identity)) == record


def test_refused_senders_are_read_unchanged_as_far_as_the_record_has_space():
    identity = Identity.generate()
    refused = tuple((Identity.generate().peer_id, "r" * MAX_REASON_BYTES, 10**9) for _ in range(MAX_REFUSED_SENDERS))
    record = replace(_record(identity), stats=PeerStats(refused_senders=refused))
    assert open_peer_record(seal_peer_record(record, identity)) == record
    sources = tuple((Identity.generate().peer_id, 10**6) for _ in range(MAX_GROUP_SOURCES))
    stats = PeerStats(refused_senders=refused, sources=sources)
    large = replace(record, name="n" * 64, model="m" * 128, domain="d" * 512, stats=stats)
    data = seal_peer_record(large, identity)
    read = open_peer_record(data).stats
    assert len(data) <= MAX_PEER_RECORD_BYTES - MAX_OVERHEAD_BYTES
    assert read is not None and read.sources == sources
    assert read.refused_senders == refused[: len(read.refused_senders)]
    assert 0 < len(read.refused_senders) < len(refused)


@pytest.mark.parametrize(
    "stats",
    [
        pb.PeerStats(groups_per_minute=float("nan")), pb.PeerStats(groups_per_minute=float("inf")),
        pb.PeerStats(pass_rates=[pb.PassRate(pass_at_1=1.5)]),
        pb.PeerStats(pass_rates=[pb.PassRate()] * (MAX_PASS_RATES + 1)),
        pb.PeerStats(sources=[pb.GroupSource(peer=b"no peer id", groups=1)]), pb.PeerStats(step=2**64 - 1),
        pb.PeerStats(refused_senders=[pb.RefusedSender(peer=b"no peer id", groups=1)]),
        pb.PeerStats(refused_senders=[pb.RefusedSender(peer=Identity.generate().peer, reason="r" * 33, groups=1)]),
    ],
)  # fmt: skip
def test_a_record_with_measurements_out_of_bounds_is_refused(stats):
    identity = Identity.generate()
    info = pb.PeerInfo.FromString(pb.PeerRecord.FromString(seal_peer_record(_record(identity), identity)).body)
    info.stats.CopyFrom(stats)
    with pytest.raises(RecordError, match="malformed"):
        open_peer_record(sign_peer_info(info.SerializeToString(), identity))
