"""One row of the buffer: made from an accepted group, checked against its checksum, read for a step.

The checksum covers the columns that this node computes or derives, such as prompt ids, rewards and policy version.
SQLite's integrity check does not notice a bit that flips on disk. The envelope's id is its hash, so it needs none.
"""

from __future__ import annotations

import json
import sqlite3
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ftis_node.errors import RecordError
from ftis_node.records.envelope import Accepted, Envelope, open_envelope
from ftis_node.records.group import PromptRef
from ftis_node.records.parsing import settle
from ftis_node.replay.group_choice import Candidate
from ftis_node.replay.lifecycle import ReleaseReason, State

Row = Mapping[str, Any] | sqlite3.Row


NOTED = (
    *("id", "own", "sender", "number", "task", "prompt_index", "model", "policy_version", "created_at", "admitted_at"),
    *("num_tokens", "rewards", "prompt_ids", "text_token_ids", "observation_ids", "weights_of", "problem"),
)  # the columns that never change
CANDIDATE_COLUMNS = ", ".join(Candidate.__slots__)
REASONS = frozenset(ReleaseReason)
STATES = frozenset(State)


def new_row(accepted: Accepted, *, own: bool) -> dict[str, str | int | float | bytes | None]:
    group = accepted.group
    text_token_ids = None
    if accepted.exact_group is not None:  # the ids that this node gave to the texts of a group
        text_token_ids = json.dumps([ids.tolist() for ids in group.tokens.ids_of_each()])
    row: dict[str, str | int | float | bytes | None] = {
        "id": accepted.envelope.id,
        "own": int(own),
        "sender": group.sender,
        "number": group.number,
        "task": group.prompt_ref.task,
        "prompt_index": group.prompt_ref.index,
        "model": group.model,
        "policy_version": group.policy_version,
        "created_at": float(group.created_at),
        "admitted_at": time.time(),
        "num_tokens": group.num_tokens,
        "rewards": np.asarray(group.rewards, dtype="<f4").tobytes(),
        "prompt_ids": np.asarray(accepted.prompt_ids, dtype="<i4").tobytes(),
        "text_token_ids": text_token_ids,
        "observation_ids": json.dumps(accepted.observation_ids) if group.turn_lengths else None,
        "weights_of": group.weights_of,
        "problem": group.problem_hash,
    }
    envelope = accepted.envelope_bytes
    checksum = checksum_of(row)
    return row | {"checksum": checksum, "envelope": envelope, "num_bytes": len(envelope), "state": State.READY}


def checksum_of(row: Row) -> int:
    """Return the CRC-32 of the columns that never change, with the values that a query returns."""
    return zlib.crc32(msgspec.msgpack.encode([row[name] for name in NOTED]))


def candidate_of(row: sqlite3.Row) -> Candidate:
    rewards = tuple(np.frombuffer(row["rewards"], "<f4").tolist())
    return Candidate(**{**dict(row), "own": bool(row["own"]), "rewards": rewards})


def rewards_of(row: Row) -> tuple[float, ...]:
    """Return the rewards as the short decimals that they were."""
    return tuple(map(settle, np.frombuffer(row["rewards"], "<f4")))


def sound_envelope(row: sqlite3.Row) -> Envelope | None:
    """Return the envelope of a row that still holds the stored values; None if a value has changed.

    The envelope must hash to the row's id, and the columns that never change must match the checksum.
    """
    try:
        envelope = open_envelope(row["envelope"])
    except (RecordError, TypeError):
        return None
    is_sound = (
        envelope.id == row["id"]
        and row["state"] in STATES
        and (row["reason"] is None or row["reason"] in REASONS)
        and row["checksum"] == checksum_of(row)
    )
    return envelope if is_sound else None


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A stored group: the signed body, and this node's rewards, prompt and ids of texts.

    `problem` identifies the problem by its messages, because several indices may have one text. `prompt_ids` holds
    little-endian int32. `text_token_ids` is empty for a body with token ids, `observation_ids` without episodes.
    """

    id: bytes
    own: bool
    sender: str
    number: int
    prompt_ref: PromptRef
    problem: bytes
    weights_of: str | None
    rewards: tuple[float, ...]
    prompt_ids: bytes
    body: bytes
    num_tokens: int
    text_token_ids: tuple[tuple[int, ...], ...] = ()
    observation_ids: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def from_row(cls, row: Row, envelope: Envelope) -> StoredGroup:
        return cls(
            id=row["id"],
            own=bool(row["own"]),
            sender=row["sender"],
            number=row["number"],
            prompt_ref=PromptRef(row["task"], "train", row["prompt_index"]),
            problem=row["problem"],
            weights_of=row["weights_of"],
            rewards=rewards_of(row),
            prompt_ids=row["prompt_ids"],
            body=envelope.body,
            num_tokens=row["num_tokens"],
            text_token_ids=tuple(map(tuple, json.loads(row["text_token_ids"] or "[]"))),
            observation_ids=tuple(map(tuple, json.loads(row["observation_ids"] or "[]"))),
        )

    @classmethod
    def from_accepted(cls, accepted: Accepted, *, own: bool) -> StoredGroup:
        """Return an accepted group in the form in which `ReplayBuffer.take` returns it."""
        return cls.from_row(new_row(accepted, own=own), accepted.envelope)
