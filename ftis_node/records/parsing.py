"""Parses bytes from a peer to a message: checks the size before parsing, then the schema and the bounds.

This is the only place where bytes become a message. Every returned message has passed the tables of `bounds.py`.
The header of a `Body` is all that the token form and the text form of a group share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar, get_args

import numpy as np
from google.protobuf.message import DecodeError, Message

from ftis_node.errors import RecordError, SchemaRecordError
from ftis_node.records import rollout_pb2 as pb
from ftis_node.records.bounds import (
    BODIES,
    MAX_COMPLETIONS,
    MAX_INTEGER,
    MAX_NAME_BYTES,
    TABLES,
    milliseconds,
    require_bounds,
    seconds,
)
from ftis_node.records.group import FinishReason, Group, PromptRef, SamplingSettings, TextGroup
from ftis_node.records.identity import peer_id_from_text, peer_id_text
from ftis_node.records.names import Codec

SCHEMA = 1
CODEC_NAMES = {pb.Codec.Value(f"CODEC_{name.upper()}"): name for name in (*get_args(Codec), "text")}

MessageT = TypeVar("MessageT", bound=Message)
FINISH_TO_WIRE = {reason: getattr(pb, f"FINISH_{reason.name}") for reason in FinishReason}
FINISH_FROM_WIRE = {wire: reason for reason, wire in FINISH_TO_WIRE.items()}


def fields_of(source: object, names: Iterable[str]) -> dict[str, Any]:
    """Return attributes by name: those that a record and its message have in common."""
    return {name: getattr(source, name) for name in names}


def read_message(message: MessageT, data: bytes, *, max_bytes: int) -> MessageT:
    """Fill `message` from `data` and return it, with every field within its bound.

    Raises RecordError: `size` before parsing, `parse`, `version` (another schema), `malformed`.
    """
    _parse(message, data, max_bytes=max_bytes)
    table = TABLES[type(message)]
    if "schema" in table:
        _require_schema(message)
    require_bounds(message, table)
    return message


def read_body(data: bytes, *, codecs: Collection[str]) -> pb.Body:
    """Return the `Body` in `data`, in one of `codecs` and without fields of another codec.

    Raises RecordError: `parse`, `version`, `codec`, `malformed`.
    """
    body = _parse(pb.Body(), data, max_bytes=len(data))  # the envelope's size was checked
    _require_schema(body)
    name = CODEC_NAMES.get(body.codec)
    if name is None:
        raise RecordError("codec", f"codec {body.codec} is not known here")
    if name not in codecs:
        raise RecordError("codec", f"codec {name!r}, this run takes {', '.join(codecs)}")
    require_bounds(body, BODIES[body.codec])
    return body


def _parse(message: MessageT, data: bytes, *, max_bytes: int) -> MessageT:
    name = type(message).__name__
    if len(data) > max_bytes:
        raise RecordError("size", f"a {name} of {len(data)} bytes; at most {max_bytes} are taken")
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise RecordError("parse", f"no {name} message: {error}") from None
    return message


def _require_schema(message: Any) -> None:
    if message.schema != SCHEMA:
        detail = f"schema {message.schema}, this node speaks {SCHEMA}"
        raise SchemaRecordError("version", detail, schema=message.schema)


def make_body(group: Group | TextGroup, lengths: Sequence[int], **contents: Any) -> bytes:
    """Return the bytes of a `Body`: header, completion lengths, finish reasons, and `contents` by field name.

    Raises ValueError for an impossible number of completions or an impossible range of policy versions.
    """
    if not 1 <= len(lengths) <= MAX_COMPLETIONS:
        raise ValueError(f"a group has 1 to {MAX_COMPLETIONS} completions, not {len(lengths)}")
    oldest, newest = group.policy_version, group.policy_version_newest
    return pb.Body(
        schema=SCHEMA,
        run=bytes.fromhex(group.run_id),
        sender=peer_id_from_text(group.sender),
        number=group.number,
        created_ms=milliseconds(group.created_at),
        task=group.prompt_ref.task,
        prompt_index=group.prompt_ref.index,
        problem_hash=group.problem_hash,
        model=clip_name(group.model),
        tokenizer=bytes.fromhex(group.tokenizer),
        policy_version=oldest,
        policy_version_span=newest - oldest,
        sampling=pb.Sampling(
            temperature=group.sampling.temperature, top_p=group.sampling.top_p, top_k=group.sampling.top_k
        ),
        lengths=lengths,
        finishes=[FINISH_TO_WIRE[reason] for reason in group.finish_reasons],
        rewards=group.rewards,
        weights_of=peer_id_from_text(group.weights_of) if group.weights_of else b"",
        prompt_hash=group.prompt_hash,
        end_ids=group.end_ids,
        opening=group.opening,
        **contents,
    ).SerializeToString()


def read_header(body: pb.Body) -> dict[str, Any]:
    """Return the fields of `GroupHeader` in a body from `read_body`.

    Raises RecordError (`malformed`) if fields within their bounds contradict each other.
    """
    if body.policy_version + body.policy_version_span > MAX_INTEGER:
        raise RecordError("malformed", "a version of 2^63 or more")
    num_completions = len(body.lengths)
    if len(body.finishes) != num_completions or len(body.rewards) != num_completions:
        raise RecordError("malformed", "finish reasons or rewards do not count as many as lengths")
    sampling = body.sampling
    return {
        "run_id": body.run.hex(),
        "sender": peer_id_text(body.sender),
        "number": body.number,
        "prompt_ref": PromptRef(task=body.task, split="train", index=body.prompt_index),
        "problem_hash": body.problem_hash,
        "sampling": _settle_sampling(sampling.temperature, sampling.top_p, sampling.top_k),
        "model": body.model,
        "tokenizer": body.tokenizer.hex(),
        "created_at": seconds(body.created_ms),
        "weights_of": peer_id_text(body.weights_of) if body.weights_of else None,
        "prompt_hash": body.prompt_hash,
        "end_ids": tuple(body.end_ids),
        "opening": body.opening,
    }


@lru_cache(maxsize=1024)
def settle(value: float) -> float:
    """Return the float of the shortest decimal that rounds to this float32, so that 0.95 arrives as 0.95."""
    return float(str(np.float32(value)))


@lru_cache(maxsize=64)  # the groups of a run have the same settings
def _settle_sampling(temperature: float, top_p: float, top_k: int) -> SamplingSettings:
    return SamplingSettings(temperature=settle(temperature), top_p=settle(top_p), top_k=top_k)


def clip_name(name: str, most: int = MAX_NAME_BYTES) -> str:
    """Return the first whole characters of a name that fit into `most` bytes: its readers refuse a longer one."""
    return name.encode()[:most].decode(errors="ignore")
