"""Wire forms of a group as tokens: records to bytes and back.

    exact     raw little-endian int32 ids and float32 log-probs: 8 bytes a completion token
    lossless  byte planes of both, through zstd (`compact.py`): about 5.7
    lossy     as lossless, with log-probs in units of 1/256 nat: about 3.5

All other fields take about 300 bytes (`proto/rollout.proto` describes each). The versions of each completion are sent
only if they differ. Unpacking trusts no input: it bounds sizes before a parser reads the bytes. It bounds counts before
it makes arrays or decompresses planes. Invalid input raises a `RecordError` with the rejection reason. All three forms
unpack to a `Group`.

A node that sends the lossy form also trains on it, because it reads its groups back from their bytes.
"""

from __future__ import annotations

import hashlib
from operator import add
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np

from ftis_node.errors import RecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.bounds import HASH_BYTES
from ftis_node.records.compact import pack_ids, pack_logprobs, require_compact_size, unpack_ids, unpack_logprobs
from ftis_node.records.group import CompletionStatus, Group
from ftis_node.records.header import FINISH_FROM_WIRE, make_body, read_header, require_header, settle
from ftis_node.records.parsing import read_body
from ftis_node.records.token_batch import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

CodecName: TypeAlias = Literal["exact", "lossless", "lossy"]

CODECS: dict[CodecName, int] = {name: pb.Codec.Value(f"CODEC_{name.upper()}") for name in get_args(CodecName)}


def hash_prompt(prompt_ids: Sequence[int]) -> bytes:
    """Return 16 bytes that identify a prompt's token ids."""
    return hashlib.sha256(np.asarray(prompt_ids, dtype="<i4").tobytes()).digest()[:HASH_BYTES]


def pack_group(group: Group, *, codec: CodecName = "exact") -> bytes:
    """Return the bytes of a `Body`, to be signed and hashed. Raises ValueError for an impossible group."""
    return make_body(
        group,
        group.tokens.lengths.tolist(),
        codec=CODECS[codec],
        **(_raw(group.tokens) if codec == "exact" else _compact(group.tokens, codec)),
        **_version_lists(group),
    )


def unpack_group(body_bytes: bytes) -> Group:
    """Return the group inside the bytes of a `Body`.

    Raises RecordError: `parse` (not a `Body`), `version` (another schema) or `codec` (another or unknown form).
    `malformed` means contradictory counts, lengths or names, `size` too many tokens for a compact form.
    """
    return read_group(read_body(body_bytes, codecs=CODECS))


def read_group(body: pb.Body) -> Group:
    """Return the group in a body of one of these forms, from `read_body`. Raises RecordError: `malformed`, `size`."""
    require_header(body)
    num_completions = len(body.lengths)
    first_versions, last_versions = _read_versions(body)
    return Group(
        **read_header(body),
        tokens=_read_raw(body) if body.codec == pb.CODEC_EXACT else _read_compact(body),
        finish_reasons=tuple(map(FINISH_FROM_WIRE.__getitem__, body.finishes[:])),
        rewards=tuple(map(settle, body.rewards[:])),
        statuses=(CompletionStatus.SCORED,) * num_completions,
        policy_versions=first_versions,
        policy_versions_newest=last_versions,
    )


def _raw(tokens: TokenBatch) -> dict[str, bytes]:
    return {
        "token_ids": tokens.token_ids.astype("<i4", copy=False).tobytes(),
        "logprobs": tokens.logprobs.astype("<f4", copy=False).tobytes(),
    }


def _read_raw(body: pb.Body) -> TokenBatch:
    tokens = TokenBatch.from_bytes(body.token_ids, body.logprobs, body.lengths[:])
    if not len(tokens.logprobs):
        raise RecordError("malformed", "the exact form has no log-probs")
    return tokens


def _compact(tokens: TokenBatch, codec: CodecName) -> dict[str, list[bytes]]:
    return {
        "id_planes": pack_ids(tokens.token_ids.astype("<i4", copy=False)),
        "logprob_planes": pack_logprobs(tokens.logprobs.astype("<f4", copy=False), lossy=codec == "lossy"),
    }


def _read_compact(body: pb.Body) -> TokenBatch:
    """Return the tokens of a compact form. Their number is bounded before a plane is decompressed."""
    lengths = body.lengths[:]
    num_tokens = sum(lengths)
    require_compact_size(num_tokens)
    return TokenBatch(
        unpack_ids(body.id_planes, num_tokens),
        unpack_logprobs(body.logprob_planes, num_tokens, lossy=body.codec == pb.CODEC_LOSSY),
        np.array(lengths, dtype=np.int32),
    )


def _version_lists(group: Group) -> dict[str, list[int]]:
    """Return the two fields with the versions of each completion; none if all have the group's, as a reader assumes."""
    first_versions, last_versions = group.policy_versions, group.policy_versions_newest
    if len(first_versions) == len(last_versions) and len(set(first_versions)) == len(set(last_versions)) == 1:
        return {}
    versions = list(zip(first_versions, last_versions, strict=True))
    oldest = group.policy_version
    return {
        "version_offsets": [first - oldest for first, _ in versions],
        "version_spans": [last - first for first, last in versions],
    }


def _read_versions(body: pb.Body) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the versions of each completion's first token and of its last. Raises RecordError: `malformed`."""
    oldest, span, num_completions = body.policy_version, body.policy_version_span, len(body.lengths)
    offsets, spans = body.version_offsets, body.version_spans
    if not offsets and not spans:
        return (oldest,) * num_completions, (oldest + span,) * num_completions
    if len(offsets) != num_completions or len(spans) != num_completions:
        raise RecordError("malformed", "versions do not count as many as lengths")
    if min(offsets) != 0 or max(map(add, offsets, spans)) != span:
        raise RecordError("malformed", "the completions' versions are not those of the group")
    first_versions = tuple(oldest + offset for offset in offsets)
    return first_versions, tuple(map(add, first_versions, spans))
