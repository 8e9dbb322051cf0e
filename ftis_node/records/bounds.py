"""Bounds of each field of each message from a peer: one table per message.

`parsing.read_message` is the only place where bytes become a message. It checks every field by the message's table
before any other code reads one. So every value that a reader returns fits the database, a `BackfillRequest`, a float
and the calendar. `JUDGED` marks a float that a validation rule checks (`sampling`, `reward_range`, `logprobs`), so that
the refusal has that rule's reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from operator import attrgetter, call
from typing import Any, Final, TypeAlias

from ftis_node.errors import RecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.identity import is_peer_id

RUN_ID_BYTES: Final = 16
HASH_BYTES: Final = 16
PROMPT_HASH_BYTES: Final = 4
MAX_END_IDS: Final = 64
MAX_OPENING_BYTES: Final = 64
MAX_GRADER_BYTES: Final = 256
MAX_RELEASE_BYTES: Final = 32
ID_BYTES: Final = 32  # of a group: SHA-256 of its body
DIGEST_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
MAX_COMPLETIONS: Final = 1024
MAX_TURNS: Final = 256  # of one completion
MAX_NAME_BYTES: Final = 128
MAX_PEER_NAME_BYTES: Final = 64
MAX_ROLE_BYTES: Final = 16
MAX_TEXT_BYTES: Final = 1 << 20
MAX_INTEGER: Final = 2**63 - 1  # the largest integer of SQLite
MAX_UINT32: Final = 2**32 - 1
MAX_TIME_MS: Final = 253_402_300_799_999  # the last millisecond of the year 9999, the limit of `datetime`
MAX_ENVELOPE_BYTES: Final = 4 << 20
MAX_TOKENS: Final = 524_288  # at 8 bytes each they fill an envelope of 4 MiB; the other forms have the same limit
MAX_MORE_GROUPS: Final = 10  # groups of an announcement beyond the first; with them it has at most 512 bytes
MAX_MORE_MS: Final = 86_400_000
MAX_ATTEMPT: Final = 255
ANNOUNCED_TOKENIZER_BYTES: Final = 8
MAX_TOKENS_PER_S: Final = 1e9
MAX_GROUPS_PER_MINUTE: Final = 1e9
MAX_PASS_RATES: Final = 12
MAX_GROUP_SOURCES: Final = 12
MAX_REFUSED_SENDERS: Final = 8
MAX_RECEIPTS: Final = 24
RECEIPT_KEY_BYTES: Final = 8
MAX_REASON_BYTES: Final = 32
MAX_ID_PLANES: Final = 4
NUM_FLOAT_PLANES: Final = 4
NUM_UNIT_PLANES: Final = 3
MAX_CHUNK_BYTES: Final = 1 << 20
MAX_CHUNKS: Final = 1 << 20  # 32 MiB of hashes, for a file of 1 TiB
MAX_CHUNKS_PER_QUESTION: Final = 64
MAX_PROBE_IDS: Final = 256
MAX_ADAPTER_CONFIG_BYTES: Final = 64 << 10  # names of all linear layers of a dense model of 405 B fit
LOGPROB_SLACK: Final = 1e-3  # above 0, by rounding

Bound: TypeAlias = Callable[[Any], bool]  # returns true if the field may have this value


class Table(dict[str, Bound]):
    """The bounds of two or more fields of one message, by field name."""

    @cached_property
    def read(self) -> Callable[[Any], tuple[Any, ...]]:
        """Return a function from a message to the values of these fields, in order; faster than a loop over names."""
        return attrgetter(*self)


def whole(least: int = 0, most: int = MAX_INTEGER) -> Bound:
    return lambda value: least <= value <= most


def raw(*sizes: int) -> Bound:
    return lambda value: len(value) in sizes


def raw_up_to(most: int) -> Bound:
    return lambda value: len(value) <= most


def text(most: int) -> Bound:
    return lambda value: len(value.encode()) <= most


def number(least: float = -math.inf, most: float = math.inf) -> Bound:
    """Return a bound for finite floats from `least` to `most`."""
    return lambda value: math.isfinite(value) and least <= value <= most


def many(bound: Bound, *, least: int = 0, most: int) -> Bound:
    """Return a bound for `least` to `most` values, each within `bound`."""
    return lambda values: least <= len(values) <= most and all(map(bound, values))


def many_whole(least_value: int, most_value: int, *, least: int = 0, most: int) -> Bound:
    """Return a bound for `least` to `most` integers from `least_value` to `most_value`."""

    def is_within(values: Any) -> bool:
        if not least <= len(values) <= most:
            return False
        numbers = values[:]  # a list; iteration over the field itself is several times slower
        return not numbers or (least_value <= min(numbers) and max(numbers) <= most_value)

    return is_within


def nested(table: Table) -> Bound:
    return lambda message: first_beyond(message, table) is None


def optional_peer_id(value: bytes) -> bool:
    """Accept a raw Ed25519 peer id or an empty value."""
    return not value or is_peer_id(value)


def absent(value: Any) -> bool:
    """Accept only an unset field: this form of the message does not use it."""
    return not value


def JUDGED(value: float) -> bool:
    """Accept any float, including NaN and infinity: a validation rule checks it later."""
    return True


TIME_MS: Final = whole(0, MAX_TIME_MS)
NAME: Final = text(MAX_NAME_BYTES)
VERSION: Final = whole()
SCHEMA: Final = whole(0, MAX_UINT32)  # `read_message` has compared it with our schema

SAMPLING: Final = Table(temperature=JUDGED, top_p=JUDGED, top_k=whole(0, MAX_UINT32))
HEADER: Final[dict[str, Bound]] = {
    "schema": SCHEMA,
    "codec": whole(),
    "run": raw(RUN_ID_BYTES),
    "sender": is_peer_id,
    "number": whole(),
    "created_ms": TIME_MS,
    "task": NAME,
    "prompt_index": whole(),
    "problem_hash": raw(HASH_BYTES),
    "model": NAME,
    "tokenizer": raw(HASH_BYTES),
    "policy_version": VERSION,
    "policy_version_span": whole(0, MAX_UINT32),
    "sampling": nested(SAMPLING),
    "lengths": many_whole(1, MAX_UINT32, least=1, most=MAX_COMPLETIONS),
    "finishes": many_whole(pb.FINISH_STOP, pb.FINISH_ABORT, least=1, most=MAX_COMPLETIONS),
    "rewards": many(JUDGED, least=1, most=MAX_COMPLETIONS),
    "weights_of": optional_peer_id,
    "prompt_hash": raw(PROMPT_HASH_BYTES),
    "end_ids": many_whole(0, MAX_UINT32, most=MAX_END_IDS),
    "opening": text(MAX_OPENING_BYTES),
}
CONTENTS: Final[dict[str, Bound]] = dict.fromkeys(
    (
        *("token_ids", "logprobs", "texts", "mean_logprobs", "exact_group"),
        *("version_offsets", "version_spans", "id_planes", "logprob_planes"),
        *("turns", "turn_lengths", "observation_hash"),
    ),
    absent,
)
VERSIONS: Final[dict[str, Bound]] = dict.fromkeys(
    ("version_offsets", "version_spans"), many_whole(0, MAX_UINT32, most=MAX_COMPLETIONS)
)
TURNS: Final[dict[str, Bound]] = {
    "turns": many_whole(1, MAX_TURNS, most=MAX_COMPLETIONS),
    "turn_lengths": many_whole(1, MAX_UINT32, most=MAX_TOKENS),
    "observation_hash": raw(0, HASH_BYTES),
}
PLANE: Final = raw_up_to(MAX_ENVELOPE_BYTES)
ID_PLANES: Final[dict[str, Bound]] = {"id_planes": many(PLANE, least=1, most=MAX_ID_PLANES)}
BODIES: Final[Mapping[int, Table]] = {
    pb.CODEC_EXACT: Table(
        HEADER | CONTENTS | VERSIONS | TURNS,
        token_ids=raw_up_to(MAX_ENVELOPE_BYTES),
        logprobs=raw_up_to(MAX_ENVELOPE_BYTES),
    ),
    pb.CODEC_LOSSLESS: Table(
        HEADER | CONTENTS | VERSIONS | TURNS | ID_PLANES,
        logprob_planes=many(PLANE, least=NUM_FLOAT_PLANES, most=NUM_FLOAT_PLANES),
    ),
    pb.CODEC_LOSSY: Table(
        HEADER | CONTENTS | VERSIONS | TURNS | ID_PLANES,
        logprob_planes=many(PLANE, least=NUM_UNIT_PLANES, most=NUM_UNIT_PLANES),
    ),
    pb.CODEC_TEXT: Table(
        HEADER | CONTENTS,
        texts=many(text(MAX_TEXT_BYTES), least=1, most=MAX_COMPLETIONS),
        mean_logprobs=many(JUDGED, least=1, most=MAX_COMPLETIONS),
        exact_group=raw(ID_BYTES),
    ),
}
PASS_RATE: Final = Table(step=whole(), pass_at_1=number(0.0, 1.0))
GROUP_SOURCE: Final = Table(peer=is_peer_id, groups=whole(1))
REFUSED_SENDER: Final = Table(peer=is_peer_id, reason=text(MAX_REASON_BYTES), groups=whole(1))
RECEIPT: Final = Table(key=raw(RECEIPT_KEY_BYTES), groups=whole(1), tokens=whole(1))
PEER_STATS: Final = Table(
    step=whole(),
    groups_per_minute=number(0.0, MAX_GROUPS_PER_MINUTE),
    refused_groups=whole(),
    pass_rates=many(nested(PASS_RATE), most=MAX_PASS_RATES),
    sources=many(nested(GROUP_SOURCE), most=MAX_GROUP_SOURCES),
    trained_groups=whole(),
    refused_senders=many(nested(REFUSED_SENDER), most=MAX_REFUSED_SENDERS),
    receipts=many(nested(RECEIPT), most=MAX_RECEIPTS),
)
TABLES: Final[Mapping[type, Table]] = {
    pb.Envelope: Table(body=raw_up_to(MAX_ENVELOPE_BYTES), signature=raw_up_to(MAX_ENVELOPE_BYTES)),
    pb.Announcement: Table(
        schema=SCHEMA,
        id=raw(ID_BYTES),
        number=whole(1),
        envelope_bytes=whole(1, MAX_ENVELOPE_BYTES),
        num_tokens=whole(1, MAX_TOKENS),
        tokenizer=raw(ANNOUNCED_TOKENIZER_BYTES),
        policy_version=VERSION,
        created_ms=TIME_MS,
        attempt=whole(0, MAX_ATTEMPT),
        sender=optional_peer_id,
        more_ids=many(raw(ID_BYTES), most=MAX_MORE_GROUPS),
        more_envelope_bytes=many_whole(1, MAX_ENVELOPE_BYTES, most=MAX_MORE_GROUPS),
        more_num_tokens=many_whole(1, MAX_TOKENS, most=MAX_MORE_GROUPS),
        more_created_ms=many_whole(0, MAX_MORE_MS, most=MAX_MORE_GROUPS),
    ),
    pb.Question: Table(
        schema=SCHEMA,
        sender=optional_peer_id,
        first_number=whole(),
        last_number=whole(),
        since_ms=TIME_MS,
    ),
    pb.PeerRecord: Table(body=raw_up_to(MAX_ENVELOPE_BYTES), signature=raw_up_to(MAX_ENVELOPE_BYTES)),
    pb.PeerInfo: Table(
        schema=SCHEMA,
        run=raw(RUN_ID_BYTES),
        peer=is_peer_id,
        name=text(MAX_PEER_NAME_BYTES),
        model=NAME,
        parameters=whole(),
        tokenizer=raw(HASH_BYTES),
        role=text(MAX_ROLE_BYTES),
        last_number=whole(),
        policy_version=VERSION,
        tokens_per_s=number(0.0, MAX_TOKENS_PER_S),
        created_ms=TIME_MS,
        software=NAME,
        read_shards=whole(0, 2**64 - 1),
        domain=text(MAX_ENVELOPE_BYTES),  # `open_peer_record` treats a text that is too long as empty
        stats=nested(PEER_STATS),
        grader=text(MAX_GRADER_BYTES),
        transformers=text(MAX_RELEASE_BYTES),
        template=raw(0, HASH_BYTES),
    ),
    pb.WeightsQuestion: Table(
        schema=SCHEMA,
        part=whole(pb.WEIGHTS_PART_OFFER, pb.WEIGHTS_PART_CHUNKS),
        file=raw(0, DIGEST_BYTES),
        first=whole(0, MAX_CHUNKS),
        count=whole(0, MAX_CHUNKS_PER_QUESTION),
    ),
    pb.WeightsOffer: Table(body=raw_up_to(MAX_ENVELOPE_BYTES), signature=raw_up_to(MAX_ENVELOPE_BYTES)),
    pb.WeightsInfo: Table(
        schema=SCHEMA,
        run=raw(RUN_ID_BYTES),
        peer=is_peer_id,
        version=whole(1),
        created_ms=TIME_MS,
        model=NAME,
        tokenizer=raw(HASH_BYTES),
        num_bytes=whole(1, MAX_CHUNKS * MAX_CHUNK_BYTES),
        sha256=raw(DIGEST_BYTES),
        chunk_bytes=whole(1, MAX_CHUNK_BYTES),
        chunks_sha256=raw(DIGEST_BYTES),
        probe_ids=many_whole(0, MAX_UINT32, least=2, most=MAX_PROBE_IDS),
        probe_logprobs=many(number(most=LOGPROB_SLACK), least=1, most=MAX_PROBE_IDS),
        adapter_config=raw_up_to(MAX_ADAPTER_CONFIG_BYTES),
        started_from=raw(HASH_BYTES),
    ),
}


def first_beyond(message: Any, table: Table) -> str | None:
    """Return the name of the first field of `message` beyond its bound in `table`; None if all are within."""
    values = table.read(message)
    if all(map(call, table.values(), values)):
        return None
    return next(name for (name, bound), value in zip(table.items(), values, strict=True) if not bound(value))


def require_bounds(message: Any, table: Table) -> None:
    """Raise RecordError (`malformed`) if a field is beyond its bound in `table`."""
    if (name := first_beyond(message, table)) is not None:
        raise RecordError("malformed", f"{type(message).__name__}.{name} is out of bounds")


def seconds(time_ms: int) -> float:
    return time_ms / 1000


def milliseconds(time_s: float) -> int:
    """Return a time in seconds as whole milliseconds for the wire, clamped to its bound."""
    return min(MAX_TIME_MS, max(0, round(time_s * 1000)))
