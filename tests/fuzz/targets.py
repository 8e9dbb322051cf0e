"""What a peer can hand us, as functions of bytes that may end in one way only: a value, or a refusal with a known name.

The targets whose name begins with `signed` sign what they are given, as any peer can: what lies behind a signature is
reached as well. The first byte of a case picks its target, so that one fuzzer and one corpus serve all.
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
from ftis_node.records.codec import CODECS, hash_messages, pack_group, pack_text_group, unpack_any
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

READING = {"size", "parse", "version", "codec", "malformed", "signature"}
STREAMING = {"frame_kind", "frame_size", "ids"}
SENDER = Identity.from_seed(bytes([7]) * 32)
LIMITS = GossipLimits()
MAX_MEMORY_BYTES = 1 << 20
MANIFEST = RunManifest(
    name="fuzz",
    task="arithmetic",
    sampling={"group_size": 2, "max_prompt_tokens": 10, "max_completion_tokens": 6, "max_total_tokens": 12},
    step={"other_tokenizers": "text"},
    wire={"codecs": tuple(CODECS)},
)


class SpeakingTokenizer(_Tokenizer):
    """Says texts whose words are ids."""

    eos_id = 2

    def encode_text(self, text: str) -> list[int]:
        return [int(word) for word in text.split() if word.isdecimal() and len(word) < 9]


PROMPT = ({"role": "user", "content": "2+3="},)  # of every problem in the door's tests
SEEDS_MADE_AT = 1e9  # Unix time: what is fuzzed is as fresh as its seeds
CONTEXT = _context(manifest=MANIFEST, tokenizer=SpeakingTokenizer(), now=lambda: SEEDS_MADE_AT)


def run_case(case: bytes) -> None:
    """Hands `case`, less its first byte, to the target that this byte picks. Raises where the target misbehaves."""
    if case:
        TARGETS[case[0] % len(TARGETS)](case[1:])


def name_of(case: bytes) -> str:
    """The name of the target that a case is for."""
    return TARGETS[case[0] % len(TARGETS)].__name__


def _reads(reader: Callable[[bytes], object], allowed: set[str]) -> Callable[[bytes], None]:
    def target(data: bytes) -> None:
        try:
            reader(data)
        except RecordError as error:
            if error.reason not in allowed:
                raise AssertionError(f"an unknown refusal {error.reason!r}") from error

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
    """A record in the sender's name, whatever else it says."""
    info = _parsed(pb.PeerInfo, data)
    info.peer = SENDER.peer
    told = info.SerializeToString()
    return open_peer_record(pb.PeerRecord(body=told, signature=SENDER.sign(PEER_DOMAIN, told)).SerializeToString())


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


def door(data: bytes) -> None:
    """The door on bytes as they are."""
    _judged(data)


def signed_door(data: bytes) -> None:
    """The door on a body in the sender's name, whatever else it says."""
    message = _parsed(pb.Body, data)
    message.sender = SENDER.peer
    _judged(_signed(message))


def signed_body_of_this_run(data: bytes) -> None:
    """The door on a body that has all that the cheap rules ask for, and what it likes for the rest."""
    message = _parsed(pb.Body, data)
    message.MergeFrom(pb.Body(schema=1, run=bytes.fromhex(MANIFEST.run_id), sender=SENDER.peer, number=1))
    message.task, message.prompt_index = "arithmetic", 5
    message.sampling.CopyFrom(pb.Sampling(temperature=1.0, top_p=1.0))
    own = make_group(SENDER)
    is_text = message.codec == pb.CODEC_TEXT
    message.tokenizer = bytes(16) if is_text else bytes.fromhex(own.tokenizer)
    message.prompt_hash = hash_messages(PROMPT) if is_text else own.prompt_hash
    _judged(_signed(message))


def _signed(message: pb.Body) -> bytes:
    told = message.SerializeToString()
    return Envelope(id=b"", body=told, signature=SENDER.sign(ENVELOPE_DOMAIN, told)).to_bytes()


def _parsed(kind: Any, data: bytes) -> Any:
    """The message in `data`, an empty one where there is none."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return kind()
    return message


def _judged(data: bytes) -> ValidationResult:
    verdict = _finish(validate(data, CONTEXT))
    if isinstance(verdict, Refused):
        assert verdict.refusal.reason.replace("_", "").isalpha(), verdict
        assert isinstance(verdict.refusal.detail, str)
    else:
        assert isinstance(verdict, Accepted)
        assert len(verdict.group.completions) == MANIFEST.sampling.group_size
    return verdict


def _finish(coroutine: Coroutine[Any, Any, ValidationResult]) -> ValidationResult:
    """The result of a coroutine that waits for nothing: a loop for each case would cost more than the case."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the door waited, though its scorer answers at once")


TARGETS: Sequence[Callable[[bytes], None]] = (
    _reads(envelope, READING),
    _reads(body, READING),
    _reads(announcement, READING),
    _reads(peer_record, READING),
    _reads(signed_peer_record, READING),
    _reads(ids, STREAMING),
    _reads(entry, set()),
    _reads(signed_entry, set()),
    _reads(frames, STREAMING),
    door,
    signed_door,
    signed_body_of_this_run,
)


def seeds() -> dict[str, list[bytes]]:
    """Valid input of every target, by its name: what mutation starts from."""
    group = make_group(SENDER, run_id=MANIFEST.run_id, created_at=SEEDS_MADE_AT)
    told = make_text_group(SENDER, run_id=MANIFEST.run_id, created_at=SEEDS_MADE_AT)
    spoken = replace(told, completions=tuple(replace(completion, text="10") for completion in told.completions))
    envelopes = [seal_group(group, SENDER, codec=codec).to_bytes() for codec in CODECS]
    envelopes.append(seal_group(told, SENDER).to_bytes())
    bodies = [pack_group(group, codec=codec) for codec in CODECS] + [pack_text_group(told), pack_text_group(spoken)]
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
        "door": envelopes,
        "signed_door": bodies,
        "signed_body_of_this_run": bodies,
    }


def seed_cases() -> list[bytes]:
    """The seeds as cases."""
    names = [target.__name__ for target in TARGETS]
    return [bytes([names.index(name)]) + data for name, found in seeds().items() for data in found]
