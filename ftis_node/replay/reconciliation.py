"""Reconciliation of the buffer with the learner's checkpoint and with the event log. Inside a transaction each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.replay.lifecycle import ReleaseReason, State

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Sequence

    from ftis_node.telemetry.event_log_summary import LoggedGroup


def believe_checkpoint(db: sqlite3.Connection, step: int, ids: Sequence[bytes]) -> int:
    """Make `ids` the groups that `step` trained, and no others; return how many of the others are READY again.

    A group of `ids` that an earlier step used by the buffer keeps that step, which the event log has, too.
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
        [(*trained, step, step, group_id, *trained, ReleaseReason.DAMAGED) for group_id in ids],  # damaged afterwards
    )
    return len(strayed)


def claim_used(db: sqlite3.Connection, used: Iterable[LoggedGroup]) -> int:
    """READY -> TAKEN for groups that steps have used by the event log; return how many there were.

    `ReplayBuffer.reconcile` then compares these steps with the learner's checkpoint.
    """
    query = "UPDATE groups SET state = ?, step = ? WHERE id = ? AND state = ?"
    return sum(db.execute(query, (State.TAKEN, group.step, group.id, State.READY)).rowcount for group in used)
