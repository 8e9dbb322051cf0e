"""The wire form of a group: records to bytes and back.

Packing writes ids and log-probs as raw little-endian arrays, 8 bytes a completion token, and everything else in about
300 bytes (`proto/rollout.proto` tells each field). Unpacking trusts nothing: sizes are bounded before a parser sees the
bytes, counts before arrays are made; whatever does not fit is a `RecordError` with the name of the refusal.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError

from ftis_node.errors import RecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.group import Completion, FinishReason, Group, PromptRef, SamplingSettings
from ftis_node.records.identity import PEER_ID_BYTES, peer_id_from_text, peer_id_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

SCHEMA = 1
RUN_ID_BYTES = 16
HASH_BYTES = 16
MAX_COMPLETIONS = 1024
MAX_NAME_BYTES = 128
TOKEN_BYTES = 8  # int32 id and float32 log-prob

_FINISH_TO_WIRE = {
    FinishReason.STOP: pb.FINISH_STOP,
    FinishReason.LENGTH: pb.FINISH_LENGTH,
    FinishReason.ABORT: pb.FINISH_ABORT,
}
_FINISH_FROM_WIRE = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}


def hash_prompt(prompt_ids: Sequence[int]) -> bytes:
    """16 bytes that stand for a prompt's token ids."""
    return hashlib.sha256(np.asarray(prompt_ids, dtype="<i4").tobytes()).digest()[:HASH_BYTES]


def pack_group(group: Group) -> bytes:
    """The bytes of a `Body`: what is signed, hashed and stored. Raises ValueError for an impossible group."""
    if not 1 <= len(group.completions) <= MAX_COMPLETIONS:
        raise ValueError(f"a group has 1 to {MAX_COMPLETIONS} completions, not {len(group.completions)}")
    body = pb.Body(
        schema=SCHEMA,
        codec=pb.CODEC_EXACT,
        run=bytes.fromhex(group.run_id),
        sender=peer_id_from_text(group.sender),
        number=group.number,
        created_ms=round(group.created_at * 1000),
        task=group.prompt_ref.task,
        prompt_index=group.prompt_ref.index,
        prompt_hash=group.prompt_hash,
        model=_clip(group.model),
        tokenizer=bytes.fromhex(group.tokenizer),
        policy_version=group.policy_version,
        policy_version_span=group.policy_version_newest - group.policy_version,
        sampling=pb.Sampling(
            temperature=group.sampling.temperature, top_p=group.sampling.top_p, top_k=group.sampling.top_k
        ),
        lengths=[len(completion.token_ids) for completion in group.completions],
        finishes=[_FINISH_TO_WIRE[completion.finish_reason] for completion in group.completions],
        rewards=[completion.reward for completion in group.completions],
        token_ids=_join([completion.token_ids for completion in group.completions], "<i4"),
        logprobs=_join([completion.logprobs for completion in group.completions], "<f4"),
    )
    return body.SerializeToString()


def unpack_group(body_bytes: bytes) -> Group:
    """The group inside the bytes of a `Body`.

    Raises RecordError: `parse` (no such message), `version` (another schema), `codec` (unknown layout), `malformed`
    (counts, lengths or names that contradict each other).
    """
    body = pb.Body()
    try:
        body.ParseFromString(body_bytes)
    except DecodeError as error:
        raise RecordError("parse", f"no Body message: {error}") from None
    if body.schema != SCHEMA:
        raise RecordError("version", f"schema {body.schema}, this node speaks {SCHEMA}")
    if body.codec != pb.CODEC_EXACT:
        raise RecordError("codec", f"codec {body.codec} is not known here")
    _check_shape(body)
    return Group(
        run_id=body.run.hex(),
        sender=peer_id_text(body.sender),
        number=body.number,
        prompt_ref=PromptRef(task=body.task, split="train", index=body.prompt_index),
        prompt_hash=body.prompt_hash,
        completions=_split_completions(body),
        sampling=SamplingSettings(
            temperature=_settle(body.sampling.temperature),
            top_p=_settle(body.sampling.top_p),
            top_k=body.sampling.top_k,
        ),
        model=body.model,
        tokenizer=body.tokenizer.hex(),
        policy_version=body.policy_version,
        policy_version_newest=body.policy_version + body.policy_version_span,
        created_at=body.created_ms / 1000,
    )


def _check_shape(body: pb.Body) -> None:
    """Refuses a body whose fields cannot belong together. Reads counts only; no array is made yet."""
    if len(body.run) != RUN_ID_BYTES or len(body.prompt_hash) != HASH_BYTES or len(body.tokenizer) != HASH_BYTES:
        raise RecordError("malformed", "run id, prompt hash and tokenizer fingerprint have 16 bytes each")
    if len(body.sender) != PEER_ID_BYTES:
        raise RecordError("malformed", "the sender is no Ed25519 peer id")
    if len(body.task.encode()) > MAX_NAME_BYTES or len(body.model.encode()) > MAX_NAME_BYTES:
        raise RecordError("malformed", f"a name is longer than {MAX_NAME_BYTES} bytes")
    num_completions = len(body.lengths)
    if not 1 <= num_completions <= MAX_COMPLETIONS:
        raise RecordError("malformed", f"{num_completions} completions; 1 to {MAX_COMPLETIONS} are possible")
    if len(body.finishes) != num_completions or len(body.rewards) != num_completions:
        raise RecordError("malformed", "finish reasons or rewards do not count as many as lengths")
    if min(body.lengths) < 1:
        raise RecordError("malformed", "an empty completion")
    if not all(finish in _FINISH_FROM_WIRE for finish in body.finishes):
        raise RecordError("malformed", "an unknown finish reason")
    num_bytes = 4 * sum(body.lengths)
    if len(body.token_ids) != num_bytes or len(body.logprobs) != num_bytes:
        raise RecordError("malformed", f"the arrays have not the {num_bytes} bytes that the lengths promise")


def _split_completions(body: pb.Body) -> tuple[Completion, ...]:
    """Cuts the two flat arrays into completions; the arrays share the body's memory and are read-only."""
    borders = np.cumsum(body.lengths)[:-1]
    return tuple(
        Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=_FINISH_FROM_WIRE[finish],
            reward=_settle(reward),
        )
        for token_ids, logprobs, finish, reward in zip(
            np.split(np.frombuffer(body.token_ids, dtype="<i4"), borders),
            np.split(np.frombuffer(body.logprobs, dtype="<f4"), borders),
            body.finishes,
            body.rewards,
            strict=True,
        )
    )


def _join(arrays: Sequence[NDArray[Any]], dtype: str) -> bytes:
    return np.concatenate(arrays).astype(dtype, copy=False).tobytes()


def _settle(value: float) -> float:
    """A float32 from the wire as the shortest decimal that means it: 0.95 comes back as 0.95."""
    return float(str(np.float32(value)))


def _clip(name: str) -> str:
    return name.encode()[:MAX_NAME_BYTES].decode(errors="ignore")
