"""Checksum of this node's data about a group. SQLite's integrity check does not notice a bit that flips on disk.

The envelope's id is its hash, so it needs no checksum. The checksum covers the columns that this node computes or
derives, such as prompt ids, rewards and policy version. A wrong value would be trained on, or would crash the learner.
"""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

import msgspec

from ftis_node.errors import RecordError
from ftis_node.records.envelope import open_envelope
from ftis_node.replay.lifecycle import ReleaseReason, State

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Mapping

NOTED = (
    *("id", "own", "sender", "number", "task", "prompt_index", "model", "policy_version", "created_at", "admitted_at"),
    *("num_tokens", "rewards", "prompt_ids", "text_token_ids", "weights_of"),
)
REASONS = frozenset(ReleaseReason)
STATES = frozenset(State)


def add_column(db: sqlite3.Connection) -> None:
    """Add the column if it is missing. Older versions ignore the column, so the schema number does not change."""
    if not any(row["name"] == "checksum" for row in db.execute("SELECT name FROM pragma_table_info('groups')")):
        db.execute("ALTER TABLE groups ADD COLUMN checksum INTEGER")


def checksum_of(row: Mapping[str, Any] | sqlite3.Row) -> int:
    """Return the CRC-32 of the columns that never change, with the values that a query returns."""
    return zlib.crc32(msgspec.msgpack.encode([row[name] for name in NOTED]))


def is_as_noted(row: sqlite3.Row) -> bool:
    """Return whether a whole row of `groups` matches its checksum. True if the row has none."""
    return "checksum" not in row.keys() or row["checksum"] in (None, checksum_of(row))


def is_sound(row: sqlite3.Row) -> bool:
    """Return whether a row of `groups` still holds the stored values.

    The envelope must hash to the row's id. The other columns must match the checksum. A row of an older version has no
    checksum; its columns must be valid.
    """
    try:
        envelope = open_envelope(row["envelope"])
        rewards = json.loads(row["rewards"])
    except (RecordError, ValueError, TypeError):
        return False
    return (
        envelope.id == row["id"]
        and row["state"] in STATES
        and (row["reason"] is None or row["reason"] in REASONS)
        and isinstance(rewards, list)
        and all(isinstance(reward, int | float) for reward in rewards)
        and len(row["prompt_ids"]) % 4 == 0
        and is_as_noted(row)
    )


def release_damaged(buffer: sqlite3.Connection) -> list[bytes]:
    """Release groups whose rows are damaged: any state but RELEASED -> RELEASED(damaged). Runs inside a transaction.

    Return their ids.
    """
    rows = buffer.execute("SELECT * FROM groups WHERE state != ? ORDER BY arrival", (State.RELEASED,))
    damaged = [row["arrival"] for row in rows if not is_sound(row)]
    found = [
        buffer.execute(
            "UPDATE groups SET state = ?, reason = ? WHERE arrival = ? RETURNING id",
            (State.RELEASED, ReleaseReason.DAMAGED, arrival),
        ).fetchone()["id"]
        for arrival in damaged
    ]
    return [bytes(group_id) for group_id in found]
