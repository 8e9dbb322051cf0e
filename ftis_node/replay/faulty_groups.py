"""Groups that no step may train on: their rows are damaged, or the learner fails on them. Groups of an uncertain step.

**Checksums** cover the columns that this node computes or derives, such as prompt ids, rewards and policy version.
SQLite's integrity check does not notice a bit that flips on disk. The envelope's id is its hash, so it needs none.

**Poison messages** are groups on which the learner fails. Without release, every later step would take them and fail
too. If `MAX_FAILED_STEPS` steps with a group failed, the group is released, and with it all groups that were in all of
these steps. The count is on disk, because a failed request also ends the node. The next start takes the same groups.
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
    from collections.abc import Iterable, Mapping, Sequence

    from ftis_node.telemetry.event_log_summary import LoggedGroup

NOTED = (
    *("id", "own", "sender", "number", "task", "prompt_index", "model", "policy_version", "created_at", "admitted_at"),
    *("num_tokens", "rewards", "prompt_ids", "text_token_ids", "weights_of"),
)
REASONS = frozenset(ReleaseReason)
STATES = frozenset(State)
MAX_FAILED_STEPS = 3
ADDED_COLUMNS = {"checksum": "INTEGER", "failed_steps": "INTEGER NOT NULL DEFAULT 0"}


def add_columns(db: sqlite3.Connection) -> None:
    """Add missing columns. Older versions ignore them, so the schema number does not change."""
    present = {row["name"] for row in db.execute("SELECT name FROM pragma_table_info('groups')")}
    for name, kind in ADDED_COLUMNS.items():
        if name not in present:
            db.execute(f"ALTER TABLE groups ADD COLUMN {name} {kind}")


def checksum_of(row: Mapping[str, Any] | sqlite3.Row) -> int:
    """Return the CRC-32 of the columns that never change, with the values that a query returns."""
    return zlib.crc32(msgspec.msgpack.encode([row[name] for name in NOTED]))


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
        and ("checksum" not in row.keys() or row["checksum"] in (None, checksum_of(row)))
    )


def release_damaged(buffer: sqlite3.Connection) -> list[bytes]:
    """Release groups whose rows are damaged, in any state but RELEASED; return their ids. Runs inside a transaction."""
    rows = buffer.execute("SELECT * FROM groups WHERE state != ? ORDER BY arrival", (State.RELEASED,))
    query = "UPDATE groups SET state = ?, reason = ? WHERE arrival = ? RETURNING id"
    found = [
        buffer.execute(query, (State.RELEASED, ReleaseReason.DAMAGED, arrival)).fetchone()["id"]
        for arrival in [row["arrival"] for row in rows if not is_sound(row)]
    ]
    return [bytes(group_id) for group_id in found]


def apply_checkpoint(db: sqlite3.Connection, step: int, ids: Sequence[bytes]) -> int:
    """Make `ids` the only groups that `step` trained on. Return the number of other groups, which become READY again.

    If the buffer names an earlier step for one of `ids`, that step stays, because the event log has it too.
    """
    trained = (State.RELEASED, ReleaseReason.TRAINED)
    rows = db.execute(
        "SELECT id FROM groups WHERE step = ? AND (state = ? OR reason = ?)",
        (step, State.TAKEN, ReleaseReason.TRAINED),
    )
    strayed = {row["id"] for row in rows} - set(ids)
    db.executemany(
        "UPDATE groups SET state = ?, reason = NULL, step = NULL WHERE id = ?",
        [(State.READY, group_id) for group_id in strayed],
    )
    db.executemany(
        "UPDATE groups SET state = ?, reason = ?, step = min(coalesce(step, ?), ?)"
        " WHERE id = ? AND (state != ? OR reason IN (?, ?))",
        [(*trained, step, step, group_id, *trained, ReleaseReason.DAMAGED) for group_id in ids],  # damaged later
    )
    return len(strayed)


def claim_used(db: sqlite3.Connection, used: Iterable[LoggedGroup]) -> int:
    """Mark READY groups that steps have used according to the event log: READY -> TAKEN. Return their number."""
    query = "UPDATE groups SET state = ?, step = ? WHERE id = ? AND state = ?"
    return sum(db.execute(query, (State.TAKEN, group.step, group.id, State.READY)).rowcount for group in used)


def note_failed(db: sqlite3.Connection, step: int) -> None:
    """Count a failure of `step` for each group that the step has TAKEN. Runs inside a transaction."""
    db.execute("UPDATE groups SET failed_steps = failed_steps + 1 WHERE state = ? AND step = ?", (State.TAKEN, step))


def release_poisoned(db: sqlite3.Connection) -> list[bytes]:
    """Release the READY groups whose steps failed too often; return their ids. Runs inside a transaction."""
    rows = db.execute(
        "UPDATE groups SET state = ?, reason = ? WHERE state = ? AND failed_steps >= ? RETURNING id",
        (State.RELEASED, ReleaseReason.POISONED, State.READY, MAX_FAILED_STEPS),
    )
    return [row["id"] for row in rows.fetchall()]
