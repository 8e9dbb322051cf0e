"""Small messages of peers: measurements in a directory record, requests for groups, offers and requests of weights.

The learner signs an offer of its weights, so size, hashes and probe log-probs are authentic, whichever peer then serves
the bytes. It holds only a hash of the chunk hashes, which are sent separately and checked before use.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import NamedTuple

from ftis_node.errors import RecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.bounds import (
    DIGEST_BYTES,
    MAX_CHUNKS,
    MAX_GROUP_SOURCES,
    MAX_GROUPS_PER_MINUTE,
    MAX_PASS_RATES,
    MAX_RECEIPTS,
    MAX_REFUSED_SENDERS,
    RECEIPT_KEY_BYTES,
    milliseconds,
    seconds,
)
from ftis_node.records.identity import WEIGHTS_DOMAIN, Identity, peer_id_from_text, peer_id_text, verify
from ftis_node.records.parsing import SCHEMA, clip_name, fields_of, read_message, settle

MAX_BACKFILL_REQUEST_BYTES = 256
KEY_BYTES = 32  # of Ed25519
MAX_OFFER_BYTES = 96 << 10
MAX_WEIGHTS_REQUEST_BYTES = 256
COUNTED = ("step", "refused_groups", "trained_groups")  # of a record of stats, as the message has them
OFFERED = ("version", "num_bytes", "sha256", "chunk_bytes", "chunks_sha256", "adapter_config")  # also in the message


class Receipt(NamedTuple):
    """A peer's statement that it has trained on `groups` with `tokens` of the sender with this key (`receipt_key`)."""

    key: bytes
    groups: int
    tokens: int


def receipt_key(peer_id: str) -> bytes:
    """Return what a receipt calls a peer: the first bytes of its Ed25519 key; empty for an invalid id."""
    try:
        return peer_id_from_text(peer_id)[-KEY_BYTES:][:RECEIPT_KEY_BYTES]
    except ValueError:
        return b""


@dataclass(frozen=True, slots=True)
class PeerStats:
    """Claims of a peer about its progress, for display only: no decision depends on them.

    `pass_rates` are pairs of a step and pass@1 in [0, 1], the oldest first. `sources` are pairs of a peer id and the
    number of its groups among the `trained_groups` of the last steps, the largest number first. `refused_senders` are
    triples of a peer id, the reason, and the number of its refused groups.
    """

    step: int = 0
    groups_per_minute: float = 0.0
    refused_groups: int = 0
    pass_rates: tuple[tuple[int, float], ...] = ()
    sources: tuple[tuple[str, int], ...] = ()
    trained_groups: int = 0
    refused_senders: tuple[tuple[str, str, int], ...] = ()
    receipts: tuple[Receipt, ...] = ()


@dataclass(frozen=True, slots=True)
class Releases:
    """Claims of a peer about the packages with which it judges groups; "" if it names none.

    `grader` names those that decide problem texts and rewards, `transformers` is the release that tokenizes.
    `template` identifies the chat template with its variables (`PromptTokenizer.template_digest`).
    """

    grader: str = ""
    transformers: str = ""
    template: str = ""


def pack_stats(stats: PeerStats) -> pb.PeerStats:
    """Return the message, within the bounds that readers require."""
    return pb.PeerStats(
        **fields_of(stats, COUNTED),
        groups_per_minute=min(max(stats.groups_per_minute, 0.0), MAX_GROUPS_PER_MINUTE),
        pass_rates=[pb.PassRate(step=step, pass_at_1=rate) for step, rate in stats.pass_rates[-MAX_PASS_RATES:]],
        sources=[
            pb.GroupSource(peer=peer_id_from_text(peer_id), groups=groups)
            for peer_id, groups in stats.sources[:MAX_GROUP_SOURCES]
        ],
        refused_senders=[
            pb.RefusedSender(peer=peer_id_from_text(peer_id), reason=reason, groups=groups)
            for peer_id, reason, groups in stats.refused_senders[:MAX_REFUSED_SENDERS]
        ],
        receipts=[pb.Receipt(**one._asdict()) for one in stats.receipts[:MAX_RECEIPTS]],
    )


def unpack_stats(message: pb.PeerStats) -> PeerStats:
    return PeerStats(
        **fields_of(message, COUNTED),
        groups_per_minute=message.groups_per_minute,
        pass_rates=tuple((one.step, one.pass_at_1) for one in message.pass_rates),
        sources=tuple((peer_id_text(one.peer), one.groups) for one in message.sources),
        refused_senders=tuple((peer_id_text(one.peer), one.reason, one.groups) for one in message.refused_senders),
        receipts=tuple(Receipt(one.key, one.groups, one.tokens) for one in message.receipts),
    )


@dataclass(frozen=True, slots=True)
class BackfillRequest:
    """Query for groups that meet all given conditions.

    `last_number` None sets no upper bound. `since` is Unix time in seconds.
    """

    sender: str | None = None
    first_number: int = 0
    last_number: int | None = None
    since: float = 0.0

    def to_bytes(self) -> bytes:
        return pb.Question(
            schema=SCHEMA,
            sender=b"" if self.sender is None else peer_id_from_text(self.sender),
            first_number=self.first_number,
            last_number=self.last_number or 0,
            since_ms=milliseconds(self.since),
        ).SerializeToString()


def open_backfill_request(data: bytes) -> BackfillRequest:
    """Return the request in `data`. Raises RecordError (`size`, `parse`, `version`, `malformed`)."""
    message = read_message(pb.Question(), data, max_bytes=MAX_BACKFILL_REQUEST_BYTES)
    if (message.first_number or message.last_number) and not message.sender:
        raise RecordError("malformed", "sequence numbers without a sender")
    return BackfillRequest(
        sender=peer_id_text(message.sender) if message.sender else None,
        first_number=message.first_number,
        last_number=message.last_number or None,
        since=seconds(message.since_ms),
    )


@dataclass(frozen=True, slots=True)
class WeightsOffer:
    """One version of a learner's weights.

    `sha256` is the hash of the file, `chunks_sha256` that of the concatenated chunk hashes. `adapter_config` is peft's
    JSON if the file is an adapter, else empty. `created_at` is Unix time in seconds by the learner's clock.
    """

    run_id: str
    peer_id: str
    version: int
    created_at: float
    model: str
    tokenizer: str
    started_from: str
    num_bytes: int
    sha256: bytes
    chunk_bytes: int
    chunks_sha256: bytes
    probe_ids: tuple[int, ...]
    probe_logprobs: tuple[float, ...]
    adapter_config: bytes = b""

    @property
    def num_chunks(self) -> int:
        return -(-self.num_bytes // self.chunk_bytes)

    def size_of(self, chunk: int) -> int:
        """Return the size in bytes of the chunk with this index; the last one may be smaller."""
        return min(self.chunk_bytes, self.num_bytes - chunk * self.chunk_bytes)

    def lists(self, hashes: bytes) -> bool:
        """Return whether `hashes` are the concatenated hashes of the file's chunks."""
        return len(hashes) == DIGEST_BYTES * self.num_chunks and hashlib.sha256(hashes).digest() == self.chunks_sha256


def seal_offer(offer: WeightsOffer, identity: Identity) -> bytes:
    body = pb.WeightsInfo(
        **fields_of(offer, OFFERED),
        schema=SCHEMA,
        run=bytes.fromhex(offer.run_id),
        peer=peer_id_from_text(offer.peer_id),
        created_ms=milliseconds(offer.created_at),
        model=clip_name(offer.model),
        tokenizer=bytes.fromhex(offer.tokenizer),
        started_from=bytes.fromhex(offer.started_from),
        probe_ids=offer.probe_ids,
        probe_logprobs=offer.probe_logprobs,
    ).SerializeToString()
    return pb.WeightsOffer(body=body, signature=identity.sign(WEIGHTS_DOMAIN, body)).SerializeToString()


def open_offer(data: bytes) -> WeightsOffer:
    """Return the verified offer in `data`. Raises RecordError: `size`, `parse`, `version`, `malformed`, `signature`."""
    outer = read_message(pb.WeightsOffer(), data, max_bytes=MAX_OFFER_BYTES)
    info = read_message(pb.WeightsInfo(), outer.body, max_bytes=MAX_OFFER_BYTES)
    if info.num_bytes > MAX_CHUNKS * info.chunk_bytes:
        raise RecordError("malformed", f"an offer of {info.num_bytes} bytes in chunks of {info.chunk_bytes}")
    if len(info.probe_logprobs) != len(info.probe_ids) - 1:
        raise RecordError("malformed", "an offer needs one log-prob for each probe token except the first")
    if not verify(info.peer, WEIGHTS_DOMAIN, outer.body, outer.signature):
        raise RecordError("signature", "the offer is not signed by the peer it names")
    return WeightsOffer(
        **fields_of(info, OFFERED),
        run_id=info.run.hex(),
        peer_id=peer_id_text(info.peer),
        created_at=seconds(info.created_ms),
        model=info.model,
        tokenizer=info.tokenizer.hex(),
        started_from=info.started_from.hex(),
        probe_ids=tuple(info.probe_ids),
        probe_logprobs=tuple(map(settle, info.probe_logprobs)),
    )


class WeightsPart(IntEnum):
    OFFER = pb.WEIGHTS_PART_OFFER
    HASHES = pb.WEIGHTS_PART_HASHES
    CHUNKS = pb.WEIGHTS_PART_CHUNKS


@dataclass(frozen=True, slots=True)
class WeightsRequest:
    """A generator's request: the newest offer, or the chunk hashes or chunks of one file.

    `file` is the SHA-256 of that file, empty in a request for an offer.
    """

    part: WeightsPart
    file: bytes = b""
    first: int = 0
    count: int = 0

    def to_bytes(self) -> bytes:
        """Return the request as sent, fewer than 64 bytes."""
        return pb.WeightsQuestion(schema=SCHEMA, **asdict(self)).SerializeToString()


def open_weights_request(data: bytes) -> WeightsRequest:
    """Return the request in a peer's bytes. Raises RecordError: `size`, `parse`, `version`, `malformed`."""
    message = read_message(pb.WeightsQuestion(), data, max_bytes=MAX_WEIGHTS_REQUEST_BYTES)
    part = WeightsPart(int(message.part))
    if len(message.file) != (0 if part is WeightsPart.OFFER else DIGEST_BYTES):
        raise RecordError("malformed", "a request names its file by 32 bytes")
    if part is WeightsPart.CHUNKS and not message.count:
        raise RecordError("malformed", f"{message.count} chunks in one request")
    return WeightsRequest(part, message.file, message.first, message.count)
