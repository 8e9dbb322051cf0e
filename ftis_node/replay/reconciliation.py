"""Reconciliation of the buffer with the learner's checkpoint and the event log. All functions need a transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.replay.lifecycle import ReleaseReason, State

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Sequence

    from ftis_node.telemetry.event_log_summary import LoggedGroup


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
