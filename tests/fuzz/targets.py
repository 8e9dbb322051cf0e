"""The readers of bytes from peers as targets: each returns a value or rejects the bytes with a known reason.

Targets whose name begins with `signed` sign their input, as any peer can, and so reach the code behind the signature
check. The first byte of a case is the index of its target, so one fuzzer and one corpus serve all targets.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from ftis_node.config.manifest import RunManifest
from ftis_node.errors import RecordError
from ftis_node.gossip import GossipLimits
from ftis_node.gossip.directory import entries
from ftis_node.gossip.wire_format import Frame, read_frame, unpack_ids
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.codec import CODECS, pack_group, pack_text_group, unpack_any
from ftis_node.records.envelope import (
    Announcement,
    Envelope,
    PeerRecord,
    open_announcement,
    open_envelope,
    open_peer_record,
    seal_group,
    seal_peer_record,
)
from ftis_node.records.identity import ENVELOPE_DOMAIN, PEER_DOMAIN, Identity
from ftis_node.validation import Accepted, Refused, validate
from tests.conftest import make_group, make_text_group
from tests.validation.test_pipeline import _context, _Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from ftis_node.validation import ValidationResult

READER_REASONS = {"size", "parse", "version", "codec", "malformed", "signature"}
STREAM_REASONS = {"frame_kind", "frame_size", "ids"}
SENDER = Identity.from_seed(bytes([7]) * 32)
LIMITS = GossipLimits()
MANIFEST = RunManifest(
    name="fuzz",
    task="arithmetic",
    sampling={"group_size": 2, "max_prompt_tokens": 10, "max_completion_tokens": 6, "max_total_tokens": 12},
    step={"other_tokenizers": "text"},
    wire={"codecs": tuple(CODECS)},
)


class TextTokenizer(_Tokenizer):
    """A tokenizer that encodes each number in a text as the id of that value."""

    eos_id = 2

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def encode_text(self, text: str) -> list[int]:
        return [int(word) for word in text.split() if word.isdecimal() and len(word) < 9]


SEEDS_MADE_AT = 1e9  # Unix time of the seeds, and of the validating node
CONTEXT = _context(manifest=MANIFEST, tokenizer=TextTokenizer(), now=lambda: SEEDS_MADE_AT)


def run_case(case: bytes) -> None:
    """Run the target of `case`. Raises an exception if the tested code is wrong."""
    if case:
        TARGETS[case[0] % len(TARGETS)](case[1:])


def name_of(case: bytes) -> str:
    """Return the name of the target of a case."""
    return TARGETS[case[0] % len(TARGETS)].__name__


def _reads(reader: Callable[[bytes], object], allowed: set[str]) -> Callable[[bytes], None]:
    def target(data: bytes) -> None:
        try:
            reader(data)
        except RecordError as error:
            if error.reason not in allowed:
                raise AssertionError(f"unknown reason {error.reason!r}") from error

    target.__name__ = getattr(reader, "__name__", "reader")
    return target


def envelope(data: bytes) -> object:
    return unpack_any(open_envelope(data).body)


def body(data: bytes) -> object:
    return unpack_any(data)


def announcement(data: bytes) -> object:
    return open_announcement(data)


def peer_record(data: bytes) -> object:
    return open_peer_record(data)


def signed_peer_record(data: bytes) -> object:
    """Read a signed record of the sender with any other content."""
    info = _parsed(pb.PeerInfo, data)
    info.peer = SENDER.peer
    body = info.SerializeToString()
    return open_peer_record(pb.PeerRecord(body=body, signature=SENDER.sign(PEER_DOMAIN, body)).SerializeToString())


def ids(data: bytes) -> object:
    return unpack_ids(data, limits=LIMITS)


def entry(data: bytes) -> object:
    found = entries.verify_entry(data, max_record_bytes=LIMITS.max_record_bytes)
    return found and (found.key, found.subkey, entries.unpack_addresses(found.payload))


def signed_entry(data: bytes) -> object:
    kind = entries.EntryKind.MEMBER if data[:1] < b"\x80" else entries.EntryKind.RECORD
    sealed = entries.sign_entry(SENDER, kind, MANIFEST.run_id, data[1:], expires_at=1e9)
    return entry(sealed)


def frames(data: bytes) -> object:
    return asyncio.run(_read_frames(data))


async def _read_frames(data: bytes) -> list[Frame]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    kinds = []
    try:
        while True:
            kinds.append((await read_frame(reader, max_bytes=LIMITS.max_body_bytes, idle_s=1.0))[0])
    except asyncio.IncompleteReadError:
        return kinds


def validation(data: bytes) -> None:
    """Validate raw bytes."""
    _validated(data)


def signed_validation(data: bytes) -> None:
    """Validate a signed body of the sender with any other content."""
    message = _parsed(pb.Body, data)
    message.sender = SENDER.peer
    _validated(_signed(message))


def signed_body_of_this_run(data: bytes) -> None:
    """Validate a signed body that passes the cheap rules and has any other content."""
    message = _parsed(pb.Body, data)
    message.MergeFrom(pb.Body(schema=1, run=bytes.fromhex(MANIFEST.run_id), sender=SENDER.peer, number=1))
    message.task, message.prompt_index = "arithmetic", 5
    message.sampling.CopyFrom(pb.Sampling(temperature=1.0, top_p=1.0))
    own = make_group(SENDER)
    is_text = message.codec == pb.CODEC_TEXT
    message.tokenizer = bytes(16) if is_text else bytes.fromhex(own.tokenizer)
    message.problem_hash, message.prompt_hash = own.problem_hash, own.prompt_hash
    _validated(_signed(message))


def _signed(message: pb.Body) -> bytes:
    body = message.SerializeToString()
    return Envelope(id=b"", body=body, signature=SENDER.sign(ENVELOPE_DOMAIN, body)).to_bytes()


def _parsed(kind: Any, data: bytes) -> Any:
    """Return the message in `data`, or an empty one if it does not parse."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return kind()
    return message


def _validated(data: bytes) -> ValidationResult:
    verdict = _finish(validate(data, CONTEXT))
    if isinstance(verdict, Refused):
        assert verdict.refusal.reason.replace("_", "").isalpha(), verdict
        assert isinstance(verdict.refusal.detail, str)
    else:
        assert isinstance(verdict, Accepted)
        assert len(verdict.group.completions) == MANIFEST.sampling.group_size
    return verdict


def _finish(coroutine: Coroutine[Any, Any, ValidationResult]) -> ValidationResult:
    """Return the result of a coroutine that never waits, without the cost of an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("validation waited, though its scorer returns at once")


TARGETS: Sequence[Callable[[bytes], None]] = (
    _reads(envelope, READER_REASONS),
    _reads(body, READER_REASONS),
    _reads(announcement, READER_REASONS),
    _reads(peer_record, READER_REASONS),
    _reads(signed_peer_record, READER_REASONS),
    _reads(ids, STREAM_REASONS),
    _reads(entry, set()),
    _reads(signed_entry, set()),
    _reads(frames, STREAM_REASONS),
    validation,
    signed_validation,
    signed_body_of_this_run,
)


def seeds() -> dict[str, list[bytes]]:
    """Return valid inputs by the name of their target, from which mutation starts."""
    group = make_group(SENDER, run_id=MANIFEST.run_id, created_at=SEEDS_MADE_AT)
    text_group = make_text_group(SENDER, run_id=MANIFEST.run_id, created_at=SEEDS_MADE_AT)
    parsable = replace(
        text_group, completions=tuple(replace(completion, text="10") for completion in text_group.completions)
    )
    envelopes = [seal_group(group, SENDER, codec=codec).to_bytes() for codec in CODECS]
    envelopes.append(seal_group(text_group, SENDER).to_bytes())
    bodies = [pack_group(group, codec=codec) for codec in CODECS] + [
        pack_text_group(text_group),
        pack_text_group(parsable),
    ]
    announced = Announcement(bytes(32), 1, 100, 5, bytes(8), 3, SEEDS_MADE_AT).to_bytes()
    record = PeerRecord(MANIFEST.run_id, SENDER.peer_id, "n", "m", 1, "0" * 32, "full", 1, 1, 1.0, SEEDS_MADE_AT, "1")
    sealed = seal_peer_record(record, SENDER)
    kinds = entries.EntryKind
    return {
        "envelope": envelopes,
        "body": bodies,
        "announcement": [announced],
        "peer_record": [sealed],
        "signed_peer_record": [pb.PeerRecord.FromString(sealed).body],
        "ids": [bytes(32), bytes(range(64))],
        "entry": [
            entries.sign_entry(SENDER, kind, MANIFEST.run_id, b"/ip4/1.2.3.4/tcp/1\n", expires_at=1e9) for kind in kinds
        ],
        "signed_entry": [b"\x00/ip4/1.2.3.4/tcp/1\n", b"\xff" + sealed],
        "frames": [b"\x01\0\0\0\x02hi\x03\0\0\0\0", b"\x02\xff\xff\xff\xff"],
        "validation": envelopes,
        "signed_validation": bodies,
        "signed_body_of_this_run": bodies,
    }


def seed_cases() -> list[bytes]:
    """Return the seeds as cases."""
    names = [target.__name__ for target in TARGETS]
    return [bytes([names.index(name)]) + data for name, found in seeds().items() for data in found]
