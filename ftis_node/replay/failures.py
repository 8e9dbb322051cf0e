"""Poison messages: groups on which the learner fails. Without release, every later step would take them and fail too.

If `MAX_FAILED_STEPS` steps with a group failed, the group is released. Groups that were in all of these steps are
released with it. The cause does not matter: a bug at one sequence length, or a process killed because of its memory
use. The count is on disk, because a failed request also ends the node, and the next start takes the same groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.replay.lifecycle import ReleaseReason, State

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Sequence

    from ftis_node.telemetry.event_log_summary import LoggedGroup

MAX_FAILED_STEPS = 3


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


def add_column(db: sqlite3.Connection) -> None:
    """Add the column if it is missing. Older versions ignore the column, so the schema number does not change."""
    if not any(row["name"] == "failed_steps" for row in db.execute("SELECT name FROM pragma_table_info('groups')")):
        db.execute("ALTER TABLE groups ADD COLUMN failed_steps INTEGER NOT NULL DEFAULT 0")


def note_failed(db: sqlite3.Connection, step: int) -> None:
    """Count a failure of `step` for each group that the step has TAKEN. Runs inside a transaction."""
    db.execute("UPDATE groups SET failed_steps = failed_steps + 1 WHERE state = ? AND step = ?", (State.TAKEN, step))


def release_poisoned(db: sqlite3.Connection) -> list[bytes]:
    """Release the groups whose steps failed too often: READY -> RELEASED(poisoned). Runs inside a transaction.

    Return their ids.
    """
    rows = db.execute(
        "UPDATE groups SET state = ?, reason = ? WHERE state = ? AND failed_steps >= ? RETURNING id",
        (State.RELEASED, ReleaseReason.POISONED, State.READY, MAX_FAILED_STEPS),
    )
    return [row["id"] for row in rows.fetchall()]
