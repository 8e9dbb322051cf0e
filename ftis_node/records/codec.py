"""The wire forms of a group that tell it by its tokens: records to bytes and back.

    exact     raw little-endian int32 ids and float32 log-probs: 8 bytes a completion token
    lossless  byte planes of both, through zstd (`compact.py`): about 5.7
    lossy     the same with log-probs in units of 1/256 nat: about 3.5

Everything else takes about 300 bytes (`proto/rollout.proto` tells each field); the versions of each completion only
where they differ. Unpacking trusts nothing: sizes are bounded before a parser sees the bytes, counts before arrays are
made or planes decompressed; whatever does not fit is a `RecordError` with the name of the refusal. What comes out is a
`Group` in all three cases.

A node that sends the lossy form trains on just what it sent: its own groups take the same door, as bytes.
"""

from __future__ import annotations

import hashlib
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from ftis_node.errors import RecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.bounds import HASH_BYTES
from ftis_node.records.compact import pack_ids, pack_logprobs, require_compact_size, unpack_ids, unpack_logprobs
from ftis_node.records.group import Completion, Group
from ftis_node.records.header import FINISH_FROM_WIRE, make_body, read_header, require_header, settle
from ftis_node.records.parsing import read_body

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

CodecName: TypeAlias = Literal["exact", "lossless", "lossy"]

CODECS: dict[CodecName, pb.Codec] = {
    "exact": pb.CODEC_EXACT,
    "lossless": pb.CODEC_LOSSLESS,
    "lossy": pb.CODEC_LOSSY,
}


def hash_prompt(prompt_ids: Sequence[int]) -> bytes:
    """16 bytes that stand for a prompt's token ids."""
    return hashlib.sha256(np.asarray(prompt_ids, dtype="<i4").tobytes()).digest()[:HASH_BYTES]


def pack_group(group: Group, *, codec: CodecName = "exact") -> bytes:
    """The bytes of a `Body`: what is signed, hashed and stored. Raises ValueError for an impossible group."""
    token_ids = np.concatenate([completion.token_ids for completion in group.completions], dtype="<i4")
    logprobs = np.concatenate([completion.logprobs for completion in group.completions], dtype="<f4")
    return make_body(
        group,
        [len(completion.token_ids) for completion in group.completions],
        codec=CODECS[codec],
        **(_raw(token_ids, logprobs) if codec == "exact" else _compact(token_ids, logprobs, codec)),
        **_version_lists(group),
    )


def unpack_group(body_bytes: bytes) -> Group:
    """The group inside the bytes of a `Body`.

    Raises RecordError: `parse` (no such message), `version` (another schema), `codec` (another form, or an unknown
    one), `malformed` (counts, lengths or names that contradict each other), `size` (too many tokens for a compact one).
    """
    return read_group(read_body(body_bytes, codecs=CODECS))


def read_group(body: pb.Body) -> Group:
    """The group in a body of one of these forms, from `read_body`. Raises RecordError: `malformed`, `size`."""
    require_header(body)
    token_ids, logprobs = _read_raw(body) if body.codec == pb.CODEC_EXACT else _read_compact(body)
    return Group(**read_header(body), completions=_split_completions(body, token_ids, logprobs))


def _raw(token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> dict[str, bytes]:
    return {"token_ids": token_ids.tobytes(), "logprobs": logprobs.tobytes()}


def _read_raw(body: pb.Body) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The flat arrays of the exact form; they share memory with the bytes and are read-only."""
    token_ids, logprobs, num_bytes = body.token_ids, body.logprobs, 4 * sum(body.lengths)
    if len(token_ids) != num_bytes or len(logprobs) != num_bytes:
        raise RecordError("malformed", f"the arrays have not the {num_bytes} bytes that the lengths promise")
    return np.frombuffer(token_ids, dtype="<i4"), np.frombuffer(logprobs, dtype="<f4")


def _compact(token_ids: NDArray[np.int32], logprobs: NDArray[np.float32], codec: CodecName) -> dict[str, list[bytes]]:
    """The planes of both arrays."""
    return {"id_planes": pack_ids(token_ids), "logprob_planes": pack_logprobs(logprobs, lossy=codec == "lossy")}


def _read_compact(body: pb.Body) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The flat arrays of a compact form; how large they will be is known and bounded before a plane is touched."""
    num_tokens = sum(body.lengths)
    require_compact_size(num_tokens)
    token_ids = unpack_ids(body.id_planes, num_tokens)
    return token_ids, unpack_logprobs(body.logprob_planes, num_tokens, lossy=body.codec == pb.CODEC_LOSSY)


def _version_lists(group: Group) -> dict[str, list[int]]:
    """The two fields that tell each completion's versions; none where all have the group's, as a reader assumes."""
    versions = [(completion.policy_version, completion.policy_version_newest) for completion in group.completions]
    if len(set(versions)) == 1:
        return {}
    oldest = group.policy_version
    return {
        "version_offsets": [first - oldest for first, _ in versions],
        "version_spans": [last - first for first, last in versions],
    }


def _read_versions(body: pb.Body) -> list[tuple[int, int]]:
    """The versions of each completion's first and last token. Raises RecordError: `malformed`."""
    oldest, span, num_completions = body.policy_version, body.policy_version_span, len(body.lengths)
    offsets, spans = body.version_offsets, body.version_spans
    if not offsets and not spans:
        return [(oldest, oldest + span)] * num_completions
    if len(offsets) != num_completions or len(spans) != num_completions:
        raise RecordError("malformed", "versions do not count as many as lengths")
    if min(offsets) != 0 or max(map(add, offsets, spans)) != span:
        raise RecordError("malformed", "the completions' versions are not those of the group")
    return [(oldest + offset, oldest + offset + own) for offset, own in zip(offsets, spans, strict=True)]


def _split_completions(
    body: pb.Body, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]
) -> tuple[Completion, ...]:
    """Cuts the two flat arrays into completions, which share their memory."""
    ends = list(accumulate(body.lengths))
    return tuple(
        Completion(
            token_ids=token_ids[end - length : end],
            logprobs=logprobs[end - length : end],
            finish_reason=FINISH_FROM_WIRE[finish],
            reward=settle(reward),
            policy_version=first,
            policy_version_newest=last,
        )
        for end, length, finish, reward, (first, last) in zip(
            ends, body.lengths, body.finishes, body.rewards, _read_versions(body), strict=True
        )
    )
