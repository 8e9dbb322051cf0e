"""Two small messages of peers: measurements in a directory record, and a request for groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ftis_node.errors import RecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.bounds import (
    MAX_GROUP_SOURCES,
    MAX_GROUPS_PER_MINUTE,
    MAX_PASS_RATES,
    MAX_RECEIPTS,
    MAX_REFUSED_SENDERS,
    RECEIPT_KEY_BYTES,
    milliseconds,
    seconds,
)
from ftis_node.records.identity import peer_id_from_text, peer_id_text
from ftis_node.records.parsing import SCHEMA, read_message

MAX_BACKFILL_REQUEST_BYTES = 256
KEY_BYTES = 32  # of Ed25519


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
        step=stats.step,
        groups_per_minute=min(max(stats.groups_per_minute, 0.0), MAX_GROUPS_PER_MINUTE),
        refused_groups=stats.refused_groups,
        pass_rates=[pb.PassRate(step=step, pass_at_1=rate) for step, rate in stats.pass_rates[-MAX_PASS_RATES:]],
        sources=[
            pb.GroupSource(peer=peer_id_from_text(peer_id), groups=groups)
            for peer_id, groups in stats.sources[:MAX_GROUP_SOURCES]
        ],
        trained_groups=stats.trained_groups,
        refused_senders=[
            pb.RefusedSender(peer=peer_id_from_text(peer_id), reason=reason, groups=groups)
            for peer_id, reason, groups in stats.refused_senders[:MAX_REFUSED_SENDERS]
        ],
        receipts=[pb.Receipt(**one._asdict()) for one in stats.receipts[:MAX_RECEIPTS]],
    )


def unpack_stats(message: pb.PeerStats) -> PeerStats:
    return PeerStats(
        step=message.step,
        groups_per_minute=message.groups_per_minute,
        refused_groups=message.refused_groups,
        pass_rates=tuple((one.step, one.pass_at_1) for one in message.pass_rates),
        sources=tuple((peer_id_text(one.peer), one.groups) for one in message.sources),
        trained_groups=message.trained_groups,
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
