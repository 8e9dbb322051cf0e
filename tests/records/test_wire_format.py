"""docs/reference/wire-format.md and the generated code agree with the code: bytes, names and bounds."""

import hashlib
import json
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard

from ftis_node.gossip import GossipLimits
from ftis_node.gossip.directory import entries, storage, validators
from ftis_node.gossip.frames import HEADER, Frame, unpack_ids
from ftis_node.gossip.names import RpcService, protocol, topic
from ftis_node.models.fingerprint import PROBE_TEXTS
from ftis_node.node.peers.group_requests import MAX_ANSWERS
from ftis_node.records import bounds, codec, peer_messages
from ftis_node.records import envelope as envelope_file
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.codec import pack_logprobs
from ftis_node.records.identity import peer_id_text, verify
from ftis_node.swarm.demand import NUM_TURNS, assignment_order
from ftis_node.swarm.topology import NUM_MEMBER_BUCKETS, bucket_of, shard_of
from ftis_node.telemetry.secrets import MIN_SECRET_BYTES
from tests.records import wire_example as example

PAGE = (Path(__file__).parents[2] / "docs/reference/wire-format.md").read_text()
HEX_LINE = re.compile(r" {4,}([0-9a-f]{2,})(?: {2,}.*)?")


def _bytes(name: str) -> bytes:
    """Return the bytes of a block of the page: the hex digits at the start of its lines."""
    block = PAGE.split(f"<!-- bytes: {name} -->\n", 1)[1].split("\n\n", 1)[0]
    found = [HEX_LINE.fullmatch(line) for line in block.splitlines()]
    return bytes.fromhex("".join(match[1] for match in found if match and len(match[1]) % 2 == 0))


@pytest.mark.parametrize("name", ["body", "id", "signature", "announcement", "question", "member", "fetch"])
def test_the_bytes_of_the_page_agree_with_the_code(name):
    sealed = example.envelope()
    made = {
        "body": sealed.body, "id": sealed.id, "signature": sealed.signature, "announcement": example.announcement(),
        "question": example.question(), "member": example.member(), "fetch": HEADER.pack(Frame.REQUEST, 32) + sealed.id,
    }  # fmt: skip
    assert _bytes(name).hex() == made[name].hex()


def test_a_node_reads_the_pages_request():
    assert unpack_ids(_bytes("fetch")[HEADER.size :], limits=GossipLimits()) == [example.envelope().id]


def test_a_reader_made_from_the_page_reads_a_member():
    raw = example.member()
    kind, peer, expiry, signature = raw[0], raw[1:39], raw[39:47], raw[47:111]
    run, payload = raw[112 : 112 + raw[111]], raw[112 + raw[111] :]
    peer_id = peer_id_text(peer)
    assert (kind, struct.unpack(">d", expiry)[0], run.decode()) == (2, example.EXPIRES_AT, example.RUN_ID)
    assert payload.decode().splitlines() == ["shards=8", example.ADDRESS]
    assert verify(peer, b"ftis-node/directory/1\n", raw[:1] + expiry + run + b"\n" + payload, signature)
    bucket = int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:4], "big") % 64
    assert (bucket, bucket % 8) == (43, 3) == (bucket_of(peer_id), shard_of(peer_id, 8))
    entry = entries.verify_entry(raw, max_record_bytes=2048)
    assert entry is not None and entry.key == f"/ftis/1/{example.RUN_ID}/members/43"


def test_the_lossy_planes_of_the_page_agree_with_the_code():
    logprobs = example.GROUP.completions[0].logprobs.tolist() + example.GROUP.completions[1].logprobs.tolist()
    frames = pack_logprobs(np.array(logprobs, dtype="<f4"), lossy=True)
    planes = " ".join(zstandard.ZstdDecompressor().decompress(frame).hex() for frame in frames)
    assert f"    {planes}\n" in PAGE


def test_the_names_and_the_assignment_order_agree_with_the_page():
    assert set(RpcService) == set(re.findall(r"^\| `(\w+)` \| (?:empty|ids|the same|a `)", PAGE, flags=re.MULTILINE))
    assert (topic("RUN", 3), protocol("RUN", RpcService.ASK)) == ("/ftis/1/RUN/3", "/ftis/1/RUN/ask")
    members = [f"peer-{number}" for number in range(5)]
    weigh = {name: hashlib.blake2b(name.encode(), key=_bytes("id"), digest_size=8).digest() for name in members}
    assert assignment_order(_bytes("id"), members) == sorted(members, key=lambda name: weigh[name], reverse=True)


def test_the_page_has_every_field_of_a_body_and_the_probe_texts():
    rows = re.findall(r"^\| `(\w+)` \| (\d+), ", PAGE, flags=re.MULTILINE)
    assert {(name, int(number)) for name, number in rows} == {(f.name, f.number) for f in pb.Body.DESCRIPTOR.fields}
    for text in PROBE_TEXTS:
        assert f"    {json.dumps(text)}\n" in PAGE


def test_the_bounds_of_the_page_agree_with_the_code():
    limits = GossipLimits()
    sentences = {
        "never above 4 MiB": bounds.MAX_ENVELOPE_BYTES == 4 << 20,
        "at most 512 bytes. gossipsub": envelope_file.MAX_ANNOUNCEMENT_BYTES == 512,
        "`attempt` (9, at most 255)": bounds.MAX_ATTEMPT == 255,
        "1 to 1024 of them": bounds.MAX_COMPLETIONS == 1024,
        "| `task` | 7, string | at most 128 bytes |": bounds.MAX_NAME_BYTES == 128,
        "below 2^63": bounds.MAX_INTEGER == 2**63 - 1,
        "at most 1 MiB each |": bounds.MAX_TEXT_BYTES == 1 << 20,
        "At most 524,288 tokens": codec.MAX_TOKENS == 524_288,
        "a window of 1 MiB": codec.MAX_WINDOW_BYTES == 1 << 20,
        "a `Question`, at most 256 bytes": peer_messages.MAX_BACKFILL_REQUEST_BYTES == 256,
        "a `WeightsQuestion`, at most 256 bytes": peer_messages.MAX_WEIGHTS_REQUEST_BYTES == 256,
        "an offer (at most 96 KiB)": peer_messages.MAX_OFFER_BYTES == 96 << 10,
        "`count` of them (1 to 64)": bounds.MAX_CHUNKS_PER_QUESTION == 64,
        "chunks, at most 1 MiB each": bounds.MAX_CHUNK_BYTES == limits.max_weights_item_bytes == 1 << 20,
        "32 bytes each, 1 to 64": limits.max_ids_per_request == 64,
        "have 16 MiB together": limits.max_request_bytes == 16 << 20,
        "No byte for 10 s ends a stream, and 60 s": (limits.idle_timeout_s, limits.fetch_timeout_s) == (10, 60),
        "| 2048 bytes |": limits.max_record_bytes == 2048,
        "| 512 bytes |": entries.MAX_MEMBER_BYTES == 512,
        "at most ten minutes ahead (and a minute": (limits.max_record_ttl_s, entries.CLOCK_SLACK_S) == (600, 60),
        "at most 65,536 bytes unpacked": entries.MAX_MANIFEST_BYTES == 65_536,
        "A bucket keeps 256 members": storage.MAX_MEMBERS_PER_BUCKET == 256,
        "16 keys are looked up and 256 stored": (validators.MAX_KEYS_PER_FIND, validators.MAX_KEYS_PER_STORE)
        == (16, 256),
        "modulo 64": NUM_MEMBER_BUCKETS == 64,
        "k modulo 8": NUM_TURNS == 8,
        "the oldest group first, at most 256": MAX_ANSWERS == 256,
        "The secret is 32 bytes or more": MIN_SECRET_BYTES == 32,
    }
    assert [text for text, holds in sentences.items() if not holds] == []
    assert [text for text in sentences if text not in PAGE] == []


def test_the_page_describes_the_dht_and_the_encryption():
    """Compare the formulas of the page for DHT keys and for the cipher with hivemind and the code."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    from ftis_node.gossip.encryption import SecretCipher
    from ftis_node.gossip.p2pd.hivemind_bindings import DHTID, MSGPackSerializer

    key = f"/ftis/1/{example.RUN_ID}/members/43"
    packed = b"\xd9" + bytes([len(key)]) + key.encode()  # msgpack: str 8
    assert DHTID.generate(source=key).to_bytes() == hashlib.sha1(packed).digest()
    assert DHTID.generate(source=example.IDENTITY.peer).to_bytes() == hashlib.sha1(example.IDENTITY.peer).digest()
    assert MSGPackSerializer.dumps(None) == b"\xc0"

    secret, context = bytes(range(32)), ("request", "a", "b", "/ftis/1/x/ask")
    derived = HKDF(SHA256(), 48, example.RUN_ID.encode(), b"ftis-node/secret/1").derive(secret)
    cipher = SecretCipher(secret, run_id=example.RUN_ID)
    assert cipher.wire_name(example.RUN_ID) == derived[32:].hex()
    associated = b"".join(hashlib.sha256(part.encode()).digest() for part in context)
    sealed = cipher.encrypt(b"hello", *context)
    assert ChaCha20Poly1305(derived[:32]).decrypt(sealed[:12], sealed[12:], associated) == b"hello"


ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ftis_node"
PARSING_FILE = Path("records/parsing.py")
PARSER = re.compile(r"\.(ParseFromString|FromString|MergeFromString|Parse|ParseDict)\b")


def test_the_committed_code_is_up_to_date(tmp_path):
    protoc = pytest.importorskip("grpc_tools.protoc")
    arguments = [sys.executable, f"-I{ROOT / 'proto'}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    assert protoc.main([*arguments, str(ROOT / "proto" / "rollout.proto")]) == 0
    for name in ("rollout_pb2.py", "rollout_pb2.pyi"):
        committed = (ROOT / "ftis_node" / "records" / name).read_text()
        assert committed == (tmp_path / name).read_text(), "run `make proto`"


def test_every_field_has_a_comment():
    lines = (ROOT / "proto" / "rollout.proto").read_text().splitlines()
    fields = [number for number, line in enumerate(lines) if re.match(r"\s+[\w ]+ = \d+;", line)]
    assert len(fields) > 40
    for number in fields:
        assert lines[number - 1].strip().startswith("//"), f"line {number + 1}: {lines[number].strip()}"


def test_messages_are_parsed_in_one_file_only():
    for path in sorted(PACKAGE.rglob("*.py")):
        name, source = path.relative_to(PACKAGE), path.read_text()
        if "rollout_pb2" not in source or name.name == "rollout_pb2.py" or name == PARSING_FILE:
            continue
        assert name.parts[0] == "records", f"{name}: only records/ may import the schema"
        assert not PARSER.search(source), f"{name} parses a message without a check of its bounds"
    assert PARSER.search((PACKAGE / PARSING_FILE).read_text())
