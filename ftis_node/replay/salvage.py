"""Salvage of a damaged buffer: groups whose envelope is the one that was signed, in a valid state.

A group is kept with its state, so that none is used twice. If only part of the file could be read, own groups are
numbered from the seconds since 1970 on, above any number in use. `node/storage/identity_backup.py` explains why that
is enough.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from ftis_node.errors import RecordError
from ftis_node.records.envelope import open_envelope
from ftis_node.replay.checksums import NOTED, is_as_noted
from ftis_node.replay.database import SCHEMA_VERSION, open_writer
from ftis_node.replay.forgotten import forget, is_forgotten
from ftis_node.replay.lifecycle import ReleaseReason, State
from ftis_node.replay.soundness import readable_rows

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable
    from pathlib import Path

    from ftis_node.telemetry.trail_summary import LoggedGroup

REASONS = frozenset(ReleaseReason)
STATES = frozenset(State)
LAST_NUMBER = "last_number"
COLUMNS = frozenset({*NOTED, "arrival", "state", "reason", "step", "envelope"})  # of each group, in the present schema
ADDED_LATER = frozenset({"text_token_ids", "weights_of"})  # not in the first one


def missing_columns(buffer: sqlite3.Connection) -> str:
    """What is wrong with the names of the columns, which a turned bit makes others; "" where nothing is."""
    if buffer.execute("PRAGMA user_version").fetchone()[0] != SCHEMA_VERSION:
        return ""
    names = {name for (name,) in buffer.execute("SELECT name FROM pragma_table_info('groups')")}
    missing = sorted(COLUMNS - names) if names else []
    return f"the groups have no {missing[0]}" if missing else ""


def copy_buffer(damaged: sqlite3.Connection, new: Path) -> int:
    """Writes the sound groups of `damaged` into a new buffer at `new`; how many there were."""
    buffer = open_writer(new)
    try:
        buffer.execute("BEGIN IMMEDIATE")
        columns = [row["name"] for row in buffer.execute("SELECT name FROM pragma_table_info('groups')")]
        num_groups = 0
        for row in readable_rows(damaged, "groups"):
            if is_sound(row):
                known = [name for name in columns if name in row.keys()]
                marks = ", ".join("?" * len(known))
                query = f"INSERT OR IGNORE INTO groups ({', '.join(known)}) VALUES ({marks})"
                num_groups += buffer.execute(query, [row[name] for name in known]).rowcount
        for row in readable_rows(damaged, "totals"):
            buffer.execute("INSERT OR IGNORE INTO totals (name, value) VALUES (?, ?)", (row["name"], row["value"]))
        _copy_forgotten(damaged, buffer)
        _raise_last_number(buffer, int(time.time()))
        buffer.execute("COMMIT")
        buffer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        buffer.close()
    return num_groups


def is_sound(row: sqlite3.Row) -> bool:
    """Whether a row of `groups` holds what was stored: its envelope hashes to its id, the rest has its checksum, or can
    be parsed where an older version has left none."""
    if not COLUMNS - ADDED_LATER <= set(row.keys()):
        return False
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
    """READY, TAKEN or nonsense -> RELEASED(damaged) for groups that are not what was stored. Inside a transaction."""
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


def take_again(buffer: sqlite3.Connection, used: Iterable[LoggedGroup]) -> int:
    """What a step has used is not READY, and never comes back: READY -> TAKEN, and the numbers of what is not there.

    For a buffer that has lost its last commits, or whose disk turned a bit in a step or a reason: those change, so no
    checksum covers them. `reconcile` then holds the steps against the learner's checkpoint, as ever. Returns how many
    groups it did not know to be used. Inside a transaction.
    """
    num_changed = 0
    newest = buffer.execute("SELECT coalesce(max(arrival), 0) FROM groups").fetchone()[0]
    for group in used:
        row = buffer.execute("SELECT state, reason, step FROM groups WHERE id = ?", (group.id,)).fetchone()
        if row is None and group.sender and not is_forgotten(buffer, group.sender, group.number):
            forget(buffer, group.sender, group.number, touch=newest)
            num_changed += 1
        elif row is not None and row["state"] == State.READY:
            values = (State.TAKEN, group.step, group.id)
            buffer.execute("UPDATE groups SET state = ?, step = ? WHERE id = ?", values)
            num_changed += 1
        elif row is not None and _is_noted_wrong(row, group):
            noted = (ReleaseReason.TRAINED, group.step, group.id)
            buffer.execute("UPDATE groups SET reason = ?, step = ? WHERE id = ?", noted)
            num_changed += 1
    return num_changed


def _is_noted_wrong(row: sqlite3.Row, used: LoggedGroup) -> bool:
    """Whether a RELEASED group has no reason that there is, or was trained by another step than the one that did."""
    if row["state"] != State.RELEASED:
        return False
    return row["reason"] not in REASONS or (row["reason"] == ReleaseReason.TRAINED and row["step"] != used.step)


def release_again(buffer: sqlite3.Connection, released: Iterable[tuple[bytes, str]]) -> int:
    """READY -> RELEASED for groups that the trail says were given up; how many there were. Inside a transaction."""
    return sum(
        buffer.execute(
            "UPDATE groups SET state = ?, reason = ? WHERE id = ? AND state = ?",
            (State.RELEASED, reason if reason in REASONS else ReleaseReason.DISCARDED, group_id, State.READY),
        ).rowcount
        for group_id, reason in released
    )


def forget_missing(buffer: sqlite3.Connection, groups: Iterable[LoggedGroup]) -> None:
    """Refuses from now on those of `groups` that are not kept: a peer may send them again. Inside a transaction."""
    newest = buffer.execute("SELECT coalesce(max(arrival), 0) FROM groups").fetchone()[0]
    for group in groups:
        is_kept = buffer.execute("SELECT 1 FROM groups WHERE id = ?", (group.id,)).fetchone() is not None
        if not is_kept and group.sender and not is_forgotten(buffer, group.sender, group.number):
            forget(buffer, group.sender, group.number, touch=newest)


def count_missing(buffer: sqlite3.Connection, expected: Iterable[LoggedGroup]) -> int:
    """How many of these groups are neither kept nor known to have been pruned."""
    return sum(
        buffer.execute("SELECT 1 FROM groups WHERE id = ?", (group.id,)).fetchone() is None
        and not is_forgotten(buffer, group.sender, group.number)
        for group in expected
    )


def _copy_forgotten(damaged: sqlite3.Connection, buffer: sqlite3.Connection) -> None:
    """The table has no row ids: what is read before the first torn page."""
    import sqlite3

    try:
        for row in damaged.execute("SELECT sender, first, last, touched FROM forgotten"):
            buffer.execute("INSERT OR IGNORE INTO forgotten VALUES (?, ?, ?, ?)", tuple(row))
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return


def _raise_last_number(buffer: sqlite3.Connection, number: int) -> None:
    buffer.execute(
        "INSERT INTO totals (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = max(value, ?)",
        (LAST_NUMBER, number, number),
    )
