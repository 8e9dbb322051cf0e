"""Poison messages: groups that fail the learner, and would come back into each next step and fail it as well.

A group whose steps failed `MAX_FAILED_STEPS` times is released, with the groups that were in all of these steps. The
cause does not matter: a bug at one length, or a kernel that kills the process for its memory. The count is on disk,
because a failed request ends the node too, and its next start takes the same groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.replay.lifecycle import ReleaseReason, State

if TYPE_CHECKING:
    import sqlite3

MAX_FAILED_STEPS = 3


def add_column(db: sqlite3.Connection) -> None:
    """Add the column if it is missing. An older version ignores it, so the schema number stays."""
    if not any(row["name"] == "failed_steps" for row in db.execute("SELECT name FROM pragma_table_info('groups')")):
        db.execute("ALTER TABLE groups ADD COLUMN failed_steps INTEGER NOT NULL DEFAULT 0")


def note_failed(db: sqlite3.Connection, step: int) -> None:
    """Counts a failure of `step` for each group that it had in hand (TAKEN). Inside a transaction."""
    db.execute("UPDATE groups SET failed_steps = failed_steps + 1 WHERE state = ? AND step = ?", (State.TAKEN, step))


def release_poisoned(db: sqlite3.Connection) -> list[bytes]:
    """READY -> RELEASED(poisoned) for groups whose steps failed too often; returns their ids. Inside a transaction."""
    rows = db.execute(
        "UPDATE groups SET state = ?, reason = ? WHERE state = ? AND failed_steps >= ? RETURNING id",
        (State.RELEASED, ReleaseReason.POISONED, State.READY, MAX_FAILED_STEPS),
    )
    return [row["id"] for row in rows.fetchall()]
