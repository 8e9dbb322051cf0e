"""Signed bytes: the envelope of a group, its announcement, and a peer's directory record.

A node never re-encodes an envelope. It verifies, hashes (for the id) and serves the exact bytes that the sender signed.
The `open_*` functions check form and bounds only; `validation/` checks the contents.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from ftis_node.errors import RecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.bounds import (
    ANNOUNCED_TOKENIZER_BYTES,
    MAX_ENVELOPE_BYTES,
    MAX_INTEGER,
    MAX_MORE_GROUPS,
    MAX_MORE_MS,
    MAX_PEER_NAME_BYTES,
    SIGNATURE_BYTES,
    milliseconds,
    seconds,
)
from ftis_node.records.codec import pack_group, pack_text_group, unpack_any
from ftis_node.records.group import Group, TextGroup
from ftis_node.records.identity import ENVELOPE_DOMAIN, PEER_DOMAIN, Identity, peer_id_from_text, peer_id_text, verify
from ftis_node.records.names import Codec, Role, visible_name
from ftis_node.records.parsing import SCHEMA, clip_name, fields_of, read_message
from ftis_node.records.peer_messages import PeerStats, Releases, pack_stats, unpack_stats

MAX_ANNOUNCEMENT_BYTES = 512
MAX_SHARDS = 64
MAX_PEER_RECORD_BYTES = 2048
MAX_PEER_INFO_BYTES = 1920  # the signature, and the encryption of a private run, need the rest
MAX_DOMAIN_BYTES = 512
ROLES = frozenset(get_args(Role))
# Fields that a record and its message have in common.
ANNOUNCED = ("id", "number", "envelope_bytes", "num_tokens", "tokenizer", "policy_version", "attempt")
CLAIMED = ("parameters", "last_number", "policy_version", "tokens_per_s", "software")


@dataclass(frozen=True, slots=True)
class Envelope:
    """A signed body. `id` is the SHA-256 of the body."""

    id: bytes
    body: bytes
    signature: bytes

    def to_bytes(self) -> bytes:
        return pb.Envelope(body=self.body, signature=self.signature).SerializeToString()

    def is_signed_by(self, peer_id: str) -> bool:
        return verify(peer_id_from_text(peer_id), ENVELOPE_DOMAIN, self.body, self.signature)


def seal_group(group: Group | TextGroup, identity: Identity, *, codec: Codec = "exact") -> Envelope:
    """Pack and sign a group: tokens with `codec`, text as text. The group's sender must be `identity`."""
    assert group.sender == identity.peer_id, "a node signs only what it made itself"
    body = pack_group(group, codec=codec) if isinstance(group, Group) else pack_text_group(group)
    return Envelope(id=hashlib.sha256(body).digest(), body=body, signature=identity.sign(ENVELOPE_DOMAIN, body))


def open_envelope(data: bytes, *, max_bytes: int = MAX_ENVELOPE_BYTES) -> Envelope:
    """Return the envelope in `data`. Raises RecordError: `size` before parsing, `parse` for another message."""
    message = read_message(pb.Envelope(), data, max_bytes=max_bytes)
    if not message.body or len(message.signature) != SIGNATURE_BYTES:
        raise RecordError("parse", "an envelope has a body and a signature of 64 bytes")
    return Envelope(id=hashlib.sha256(message.body).digest(), body=message.body, signature=message.signature)


def is_envelope_of(data: bytes, group_id: bytes) -> bool:
    try:
        return open_envelope(data).id == group_id
    except RecordError:
        return False


@dataclass(frozen=True, slots=True)
class Accepted:
    """A group that passed validation. `group` has our rewards; `prompt_ids` is the prompt that we rebuilt.

    `observation_ids` are the observations of an episode in our tokens: those of the first completion in order, then of
    the second, and so on. If the group arrived as text, `group` has our tokens and `exact_group` is the id of its token
    form.
    """

    envelope: Envelope
    envelope_bytes: bytes
    group: Group
    prompt_ids: tuple[int, ...]
    exact_group: bytes | None = None
    observation_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def announced_id(self) -> bytes:
        """Return the id under which the sender announced the group."""
        return self.exact_group or self.envelope.id


@dataclass(frozen=True, slots=True)
class Announcement:
    """Announcement of a group, with the data by which a peer decides whether to pull it.

    The transport names the announcer. `sender` is None if the announcer is the group's sender. `attempt` counts earlier
    announcements that no peer confirmed. `more` holds groups of the same sender that are announced with this one; their
    numbers follow without a gap.
    """

    id: bytes
    number: int
    envelope_bytes: int
    num_tokens: int
    tokenizer: bytes
    policy_version: int
    created_at: float
    attempt: int = 0
    sender: str | None = None
    more: tuple[Announcement, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the announcement as sent: about 72 bytes, and 40 for each further group."""
        created_ms = milliseconds(self.created_at)
        return pb.Announcement(
            **fields_of(self, ANNOUNCED),
            schema=SCHEMA,
            created_ms=created_ms,
            sender=b"" if self.sender is None else peer_id_from_text(self.sender),
            more_ids=[one.id for one in self.more],
            more_envelope_bytes=[one.envelope_bytes for one in self.more],
            more_num_tokens=[one.num_tokens for one in self.more],
            more_created_ms=[min(MAX_MORE_MS, max(0, milliseconds(one.created_at) - created_ms)) for one in self.more],
        ).SerializeToString()

    def _continues(self, earlier: Announcement) -> bool:
        return self == replace(
            earlier,
            id=self.id,
            number=earlier.number + 1,
            envelope_bytes=self.envelope_bytes,
            num_tokens=self.num_tokens,
            created_at=self.created_at,
        )


def announce_group(envelope: Envelope, group: Group, *, envelope_bytes: int) -> Announcement:
    return Announcement(
        id=envelope.id,
        number=group.number,
        envelope_bytes=envelope_bytes,
        num_tokens=group.num_tokens,
        tokenizer=bytes.fromhex(group.tokenizer)[:ANNOUNCED_TOKENIZER_BYTES],
        policy_version=group.policy_version,
        created_at=group.created_at,
    )


def open_announcement(data: bytes, *, since: float = -math.inf) -> Announcement:
    """Return the announcement in `data`. Raises RecordError (`size`, `parse`, `version`, `malformed`).

    Raises RecordError (`stale`) at once if all its groups were made up to `since` (Unix seconds).
    """
    message = read_message(pb.Announcement(), data, max_bytes=MAX_ANNOUNCEMENT_BYTES)
    columns = message.more_envelope_bytes, message.more_num_tokens, message.more_created_ms
    if any(len(column) != len(message.more_ids) for column in columns) or (message.more_ids and message.sender):
        raise RecordError("malformed", "an announcement of several groups with columns of different lengths")
    if message.number + len(message.more_ids) > MAX_INTEGER:
        raise RecordError("malformed", "the numbers of the announced groups are too large")
    if seconds(message.created_ms + max(message.more_created_ms, default=0)) <= since:
        raise RecordError("stale", "an announcement of old groups")
    first = Announcement(
        **fields_of(message, ANNOUNCED),
        created_at=seconds(message.created_ms),
        sender=peer_id_text(message.sender) if message.sender else None,
    )
    more = tuple(
        replace(
            first,
            id=group_id,
            number=first.number + at,
            envelope_bytes=num_bytes,
            num_tokens=num_tokens,
            created_at=seconds(message.created_ms + later_ms),
        )
        for at, (group_id, num_bytes, num_tokens, later_ms) in enumerate(
            zip(message.more_ids, *columns, strict=True), start=1
        )
    )
    return replace(first, more=more) if more else first


def join_announcements(announcements: Sequence[Announcement]) -> list[Announcement]:
    """Return the same groups in as few announcements as their bounds allow, in the same order."""
    joined: list[list[Announcement]] = []
    for one in announcements:
        if joined and len(joined[-1]) <= MAX_MORE_GROUPS and one._continues(joined[-1][-1]):
            joined[-1].append(one)
        else:
            joined.append([one])
    return [replace(first, more=tuple(more)) for first, *more in joined]


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """A peer's record in the directory, with its claims about itself.

    `domain` is the part of the task for which it generates, "" for the whole task. `role` is one of `ROLES`, "" for an
    unknown role.
    """

    run_id: str
    peer_id: str
    name: str
    model: str
    parameters: int
    tokenizer: str
    role: str
    last_number: int
    policy_version: int
    tokens_per_s: float
    created_at: float
    software: str
    read_shards: frozenset[int] = frozenset()
    domain: str = ""
    stats: PeerStats | None = None
    releases: Releases = Releases()


def seal_peer_record(record: PeerRecord, identity: Identity) -> bytes:
    """Sign a record. Leave out receipts, then refused senders, that exceed the size of a record."""
    info = pb.PeerInfo(
        **fields_of(record, CLAIMED),
        schema=SCHEMA,
        run=bytes.fromhex(record.run_id),
        peer=identity.peer,
        name=clip_name(record.name, MAX_PEER_NAME_BYTES),
        model=clip_name(record.model),
        tokenizer=bytes.fromhex(record.tokenizer),
        role=record.role,
        created_ms=milliseconds(record.created_at),
        read_shards=sum(1 << shard for shard in record.read_shards),
        domain=record.domain,
        stats=None if record.stats is None else pack_stats(record.stats),
        grader=record.releases.grader,
        transformers=record.releases.transformers,
        template=bytes.fromhex(record.releases.template),
    )
    for parts in (info.stats.receipts, info.stats.refused_senders):
        while info.ByteSize() > MAX_PEER_INFO_BYTES and parts:
            del parts[-1]
    body = info.SerializeToString()
    return pb.PeerRecord(body=body, signature=identity.sign(PEER_DOMAIN, body)).SerializeToString()


def open_peer_record(data: bytes) -> PeerRecord:
    """Return the directory record in `data`, with its signature verified.

    Raises RecordError: `size`, `parse`, `version`, `malformed`, `signature`.
    """
    outer = read_message(pb.PeerRecord(), data, max_bytes=MAX_PEER_RECORD_BYTES)
    info = read_message(pb.PeerInfo(), outer.body, max_bytes=MAX_PEER_RECORD_BYTES)
    if not verify(info.peer, PEER_DOMAIN, outer.body, outer.signature):
        raise RecordError("signature", "the directory record is not signed by the peer it names")
    return PeerRecord(
        **fields_of(info, CLAIMED),
        run_id=info.run.hex(),
        peer_id=peer_id_text(info.peer),
        name=visible_name(info.name),
        model=info.model,
        tokenizer=info.tokenizer.hex(),
        role=info.role if info.role in ROLES else "",
        created_at=seconds(info.created_ms),
        read_shards=frozenset(shard for shard in range(MAX_SHARDS) if info.read_shards >> shard & 1),
        domain=info.domain if len(info.domain.encode()) <= MAX_DOMAIN_BYTES else "",
        stats=unpack_stats(info.stats) if info.HasField("stats") else None,
        releases=Releases(info.grader, info.transformers, info.template.hex()),
    )


def decode_envelope(data: bytes) -> Group | TextGroup:
    """Return the group in an envelope of at most 4 MiB, such as a file of `replay export --format envelope`.

    Raises RecordError. Its `reason` is `signature` if the sender that the group names has not signed the bytes.
    Otherwise it names the part that is out of bounds. The contents are not validated further.
    """
    envelope = open_envelope(data)
    group = unpack_any(envelope.body)
    if not envelope.is_signed_by(group.sender):
        raise RecordError("signature", "the sender that the group names has not signed it")
    return group
