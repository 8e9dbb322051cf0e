"""Wire forms of a group: records to bytes and back.

    text      texts and their mean log-probs, for peers with another tokenizer; only the group has policy versions
    exact     raw little-endian int32 ids and float32 log-probs: 8 bytes a completion token
    lossless  byte planes of both, each one zstd frame: about 5.7
    lossy     as lossless, with log-probs in units of 1/256 nat: about 3.5

Unpacking trusts no input: it bounds sizes before a parser reads the bytes, and counts before it makes arrays or
decompresses planes. Invalid input raises a `RecordError` with the refusal reason.

The high bytes of token ids and log-probs take few values, the low bytes are noise, so each plane has its own
statistics. An importance ratio depends on the absolute error of a log-prob in nats, so a fixed point suits it better
than a shorter float. An error of 1/512 nat is at most 0.2 % of any ratio; a bfloat16 at -8 nats has 1.6 %. The 16 bits
are sent as three planes of 5, 8 and 3 bits, lowest first. This split compresses best.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from operator import add
from typing import Any, get_args

import numpy as np
import zstandard
from numpy.typing import NDArray

from ftis_node.errors import RecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.bounds import (
    HASH_BYTES,
    MAX_ID_PLANES,
    MAX_TOKENS,
    NUM_FLOAT_PLANES,
    NUM_UNIT_PLANES,
    PROMPT_HASH_BYTES,
)
from ftis_node.records.group import CompletionStatus, Group, TextCompletion, TextGroup
from ftis_node.records.names import Codec
from ftis_node.records.parsing import FINISH_FROM_WIRE, make_body, read_body, read_header, settle
from ftis_node.records.token_batch import TokenBatch

Plane = NDArray[np.uint8]


CODECS: dict[Codec, int] = {name: pb.Codec.Value(f"CODEC_{name.upper()}") for name in get_args(Codec)}
UNITS_PER_NAT = 256
MOST_UNITS = 2**16 - 1  # -255.99 nats
LOW_BITS = 5
HIGH_SHIFT = LOW_BITS + 8
# zstd's fastest strategy. The small hash table and the long minimum match keep it from matching accidental repeats. On
# noise with few values the entropy coder alone is faster and compresses better (by 10 % on the third byte of ids).
PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, window_log=14, hash_log=6, min_match=7, target_length=0
)
MAX_WINDOW_BYTES = 1 << 20  # memory of the decoder besides its output


class _Zstd(threading.local):
    """One zstd compressor and decompressor for each thread, because a zstd context is not thread-safe."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)


_zstd = _Zstd()


def pack_ids(token_ids: NDArray[np.int32]) -> list[bytes]:
    """Return the frames of the ids `[n]`. Raises ValueError for more ids than readers accept."""
    if len(token_ids) > MAX_TOKENS:
        raise ValueError(f"a compact group has at most {MAX_TOKENS} tokens, not {len(token_ids)}")
    unsigned = token_ids.view("<u4")
    num_planes = max(1, (int(unsigned.max()).bit_length() + 7) // 8)  # as the largest id needs
    return _compress(_split_bytes(unsigned)[:num_planes])


def unpack_ids(frames: Sequence[bytes], num_tokens: int) -> NDArray[np.int32]:
    """Return the ids `[num_tokens]`, read-only. Raises RecordError: `malformed`."""
    token_ids = _join_bytes(_decompress(frames, num_tokens, range(1, MAX_ID_PLANES + 1))).view("<i4")
    token_ids.flags.writeable = False
    return token_ids


def pack_logprobs(logprobs: NDArray[np.float32], *, lossy: bool) -> list[bytes]:
    """Return the frames of the log-probs `[n]`. Raises ValueError for NaN in the lossy form."""
    if not lossy:
        return _compress(_split_bytes(logprobs.view("<u4")))
    if np.isnan(logprobs).any():
        raise ValueError("the lossy form cannot hold a NaN log-prob")
    units = np.clip(np.rint(logprobs * np.float32(-UNITS_PER_NAT)), 0, MOST_UNITS).astype(np.uint16)
    planes = (units & (2**LOW_BITS - 1), units >> LOW_BITS, units >> HIGH_SHIFT)
    return _compress([plane.astype(np.uint8) for plane in planes])  # keeps the low 8 bits


def unpack_logprobs(frames: Sequence[bytes], num_tokens: int, *, lossy: bool) -> NDArray[np.float32]:
    """Return the log-probs `[num_tokens]`, read-only. Raises RecordError: `malformed`."""
    planes = _decompress(frames, num_tokens, (NUM_UNIT_PLANES if lossy else NUM_FLOAT_PLANES,))
    logprobs: NDArray[np.float32]
    if lossy:
        low, middle, high = (plane.astype(np.uint16) for plane in planes)
        if low.max() >= 2**LOW_BITS or high.max() > MOST_UNITS >> HIGH_SHIFT:
            raise RecordError("malformed", "a plane of log-probs with more bits than it has")
        units = low | middle << np.uint16(LOW_BITS) | high << np.uint16(HIGH_SHIFT)
        logprobs = units * np.float32(-1 / UNITS_PER_NAT)
    else:
        logprobs = _join_bytes(planes).view("<f4")
    logprobs.flags.writeable = False
    return logprobs


def _split_bytes(values: NDArray[Any]) -> list[Plane]:
    """Return the four bytes of little-endian uint32 `values` `[n]`, lowest first, `[n]` each."""
    return list(np.ascontiguousarray(values.view(np.uint8).reshape(-1, 4).T))


def _join_bytes(planes: Sequence[Plane]) -> NDArray[Any]:
    """Return the little-endian uint32 `[n]` with these bytes, lowest first; missing planes count as 0."""
    by_byte = np.zeros((len(planes[0]), 4), dtype=np.uint8)
    for place, plane in enumerate(planes):
        by_byte[:, place] = plane
    return by_byte.view("<u4").reshape(-1)


def _compress(planes: Sequence[Plane]) -> list[bytes]:
    return [_zstd.compressor.compress(plane.data) for plane in planes]


def _decompress(frames: Sequence[bytes], num_bytes: int, allowed: Sequence[int]) -> list[Plane]:
    """Return the read-only planes of `num_bytes` bytes in these frames. `allowed` are the possible numbers of frames.

    Raises RecordError (`malformed`).
    """
    if len(frames) not in allowed:
        raise RecordError("malformed", f"{len(frames)} planes of a compact form: too few or too many")
    planes = []
    for frame in frames:
        try:
            stated = zstandard.get_frame_parameters(frame)
            if stated.content_size != num_bytes or stated.dict_id:
                raise RecordError("malformed", f"a plane that does not declare the {num_bytes} bytes of its lengths")
            plane = _zstd.decompressor.decompress(frame, max_output_size=num_bytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise RecordError("malformed", f"a plane is not a zstd frame: {error}") from None
        if len(plane) != num_bytes:
            raise RecordError("malformed", f"a plane of {len(plane)} bytes, its lengths need {num_bytes}")
        planes.append(np.frombuffer(plane, dtype=np.uint8))
    return planes


def hash_prompt(prompt_ids: Sequence[int] | NDArray[np.int32], observation_form: Sequence[int] = ()) -> bytes:
    """Return 4 bytes by which a receiver sees whether it reads the same token ids as a group's sender.

    `observation_form` is given for episodes alone: the ids that the chat template writes around an observation.
    """
    ids = np.concatenate([np.asarray(part, dtype="<i4") for part in (prompt_ids, observation_form)])
    return hashlib.sha256(ids.tobytes()).digest()[:PROMPT_HASH_BYTES]


def pack_group(group: Group, *, codec: Codec = "exact") -> bytes:
    """Return the bytes of a `Body`, to be signed and hashed. Raises ValueError for an impossible group."""
    token_ids = group.tokens.token_ids.astype("<i4", copy=False)
    logprobs = group.tokens.logprobs.astype("<f4", copy=False)
    contents: dict[str, Any]
    if codec == "exact":
        contents = {"token_ids": token_ids.tobytes(), "logprobs": logprobs.tobytes()}
    else:
        planes = pack_logprobs(logprobs, lossy=codec == "lossy")
        contents = {"id_planes": pack_ids(token_ids), "logprob_planes": planes}
    contents |= _version_lists(group) | _turn_lists(group)
    return make_body(group, group.tokens.lengths.tolist(), codec=CODECS[codec], **contents)


def unpack_group(body_bytes: bytes) -> Group:
    """Return the group inside the bytes of a `Body`.

    Raises RecordError: `parse` (not a `Body`), `version` (another schema) or `codec` (another or unknown form).
    `malformed` means contradictory counts, lengths or names, `size` too many tokens for a compact form.
    """
    return read_group(read_body(body_bytes, codecs=CODECS))


def read_group(body: pb.Body) -> Group:
    """Return the group in a body of one of these forms, from `read_body`. Raises RecordError: `malformed`, `size`."""
    header = read_header(body)
    first_versions, last_versions = _read_versions(body)
    if body.codec == pb.CODEC_EXACT:
        tokens = TokenBatch.from_bytes(body.token_ids, body.logprobs, body.lengths[:])
        if not len(tokens.logprobs):
            raise RecordError("malformed", "the exact form has no log-probs")
    else:
        num_tokens = _count_tokens(body)
        tokens = TokenBatch(
            unpack_ids(body.id_planes, num_tokens),
            unpack_logprobs(body.logprob_planes, num_tokens, lossy=body.codec == pb.CODEC_LOSSY),
            np.array(body.lengths[:], dtype=np.int32),
        )
    return Group(
        **header,
        tokens=tokens,
        finish_reasons=tuple(map(FINISH_FROM_WIRE.__getitem__, body.finishes[:])),
        rewards=tuple(map(settle, body.rewards[:])),
        statuses=(CompletionStatus.SCORED,) * len(body.lengths),
        policy_versions=first_versions,
        policy_versions_newest=last_versions,
        turn_lengths=_read_turns(body),
        observation_hash=body.observation_hash,
    )


def _count_tokens(body: pb.Body) -> int:
    """Return the claimed number of tokens. Raises RecordError: `size`, if the exact form has no space for so many."""
    num_tokens = sum(body.lengths[:])
    if num_tokens > MAX_TOKENS:
        raise RecordError("size", f"a group of {num_tokens} tokens; at most {MAX_TOKENS} are taken")
    return num_tokens


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


def _turn_lists(group: Group) -> dict[str, Any]:
    """Return the three fields of an episode; none for a group of any other task."""
    if not group.turn_lengths:
        return {}
    return {
        "turns": [len(lengths) for lengths in group.turn_lengths],
        "turn_lengths": [length for lengths in group.turn_lengths for length in lengths],
        "observation_hash": group.observation_hash,
    }


def _read_turns(body: pb.Body) -> tuple[tuple[int, ...], ...]:
    turns, turn_lengths = body.turns[:], iter(body.turn_lengths[:])
    if bool(turns) != bool(body.observation_hash) or len(turns) not in (0, len(body.lengths)):
        raise RecordError("malformed", "turns do not count as many as lengths, or have no hash of observations")
    if sum(turns) != len(body.turn_lengths):
        raise RecordError("malformed", "lengths of turns do not count as many as turns")
    lengths_of_each = tuple(tuple(islice(turn_lengths, count)) for count in turns)
    if turns and list(map(sum, lengths_of_each)) != body.lengths[:]:
        raise RecordError("malformed", "the lengths of a completion's turns do not sum to its length")
    return lengths_of_each


def hash_observations(observations: Sequence[Sequence[str]]) -> bytes:
    """Return 16 bytes that identify the observations of a group: the texts of each completion, between its turns."""
    canonical = json.dumps(list(map(list, observations)), separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).digest()[:HASH_BYTES]


def hash_messages(messages: Sequence[Mapping[str, object]]) -> bytes:
    """Return 16 bytes that identify a problem by its chat messages, whatever tokenizer or template renders them."""
    canonical = json.dumps([dict(message) for message in messages], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).digest()[:HASH_BYTES]


def pack_text_group(group: TextGroup) -> bytes:
    """Return the bytes of a `Body` in the text form. Raises ValueError for an impossible group."""
    return make_body(
        group,
        [completion.num_tokens for completion in group.completions],
        codec=pb.CODEC_TEXT,
        texts=[completion.text for completion in group.completions],
        mean_logprobs=[completion.mean_logprob for completion in group.completions],
        exact_group=group.exact_group,
    )


def unpack_any(body_bytes: bytes, *, codecs: Collection[str] = tuple(CODECS)) -> Group | TextGroup:
    """Return the group inside the bytes of a `Body`: as text, or in one of `codecs`.

    Raises RecordError: `parse` (not a `Body`, or a text that is not UTF-8), `version`, `codec`, `malformed`,
    `size` (too many tokens).
    """
    body = read_body(body_bytes, codecs=(*codecs, "text"))
    return read_text_group(body) if body.codec == pb.CODEC_TEXT else read_group(body)


def read_text_group(body: pb.Body) -> TextGroup:
    """Return the group in a body of the text form, from `read_body`. Raises RecordError: `malformed`, `size`."""
    header = read_header(body)
    _count_tokens(body)
    if len(body.texts) != len(body.lengths) or len(body.mean_logprobs) != len(body.lengths):
        raise RecordError("malformed", "texts or mean log-probs do not count as many as lengths")
    return TextGroup(
        **header,
        policy_version=body.policy_version,
        policy_version_newest=body.policy_version + body.policy_version_span,
        exact_group=body.exact_group,
        completions=tuple(
            TextCompletion(
                text=text,
                mean_logprob=settle(mean_logprob),
                num_tokens=num_tokens,
                finish_reason=FINISH_FROM_WIRE[finish],
                reward=settle(reward),
            )
            for text, mean_logprob, num_tokens, finish, reward in zip(
                body.texts, body.mean_logprobs, body.lengths, body.finishes, body.rewards, strict=True
            )
        ),
    )
