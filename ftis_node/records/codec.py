"""The exact wire form of a group: records to bytes and back.

Packing writes ids and log-probs as raw little-endian arrays, 8 bytes a completion token, and everything else in about
300 bytes (`proto/rollout.proto` tells each field); the versions of each completion only where they differ. Unpacking
trusts nothing: sizes are bounded before a parser sees the bytes, counts before arrays are made; whatever does not fit
is a `RecordError` with the name of the refusal.
"""

from __future__ import annotations

import hashlib
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np

from ftis_node.errors import RecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.group import Completion, Group
from ftis_node.records.header import (
    FINISH_FROM_WIRE,
    HASH_BYTES,
    make_body,
    parse_body,
    read_header,
    require_codec,
    require_header,
    settle,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def hash_prompt(prompt_ids: Sequence[int]) -> bytes:
    """16 bytes that stand for a prompt's token ids."""
    return hashlib.sha256(np.asarray(prompt_ids, dtype="<i4").tobytes()).digest()[:HASH_BYTES]


def pack_group(group: Group) -> bytes:
    """The bytes of a `Body`: what is signed, hashed and stored. Raises ValueError for an impossible group."""
    return make_body(
        group,
        [len(completion.token_ids) for completion in group.completions],
        codec=pb.CODEC_EXACT,
        token_ids=_join([completion.token_ids for completion in group.completions], "<i4"),
        logprobs=_join([completion.logprobs for completion in group.completions], "<f4"),
        **_version_lists(group),
    )


def unpack_group(body_bytes: bytes) -> Group:
    """The group inside the bytes of a `Body`.

    Raises RecordError: `parse` (no such message), `version` (another schema), `codec` (another form, or an unknown
    one), `malformed` (counts, lengths or names that contradict each other).
    """
    return read_group(parse_body(body_bytes))


def read_group(body: pb.Body) -> Group:
    """The group in a parsed body. Raises RecordError: `codec`, `malformed`."""
    require_codec(body, pb.CODEC_EXACT)
    require_header(body)
    num_bytes = 4 * sum(body.lengths)
    if len(body.token_ids) != num_bytes or len(body.logprobs) != num_bytes:
        raise RecordError("malformed", f"the arrays have not the {num_bytes} bytes that the lengths promise")
    return Group(**read_header(body), completions=_split_completions(body, _read_versions(body)))


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


def _split_completions(body: pb.Body, versions: Sequence[tuple[int, int]]) -> tuple[Completion, ...]:
    """Cuts the two flat arrays into completions; the arrays share the body's memory and are read-only."""
    all_ids, all_logprobs = np.frombuffer(body.token_ids, dtype="<i4"), np.frombuffer(body.logprobs, dtype="<f4")
    ends = list(accumulate(body.lengths))
    return tuple(
        Completion(
            token_ids=all_ids[end - length : end],
            logprobs=all_logprobs[end - length : end],
            finish_reason=FINISH_FROM_WIRE[finish],
            reward=settle(reward),
            policy_version=first,
            policy_version_newest=last,
        )
        for end, length, finish, reward, (first, last) in zip(
            ends, body.lengths, body.finishes, body.rewards, versions, strict=True
        )
    )


def _join(arrays: Sequence[NDArray[Any]], dtype: str) -> bytes:
    joined: NDArray[Any] = np.concatenate(arrays).astype(dtype, copy=False)
    return joined.tobytes()
