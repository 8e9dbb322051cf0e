"""Reset of the buffer: an empty buffer replaces a file that is damaged or has lost commits.

Rollouts expire within `step.max_age_s`, so the rows of a damaged file are worth little. Four rules ensure that no group
is used twice and no sequence number is assigned twice:

    peers' groups from before the reset are rejected      `reset_at` in `totals`
    groups in the event log are rejected by number        holds even if the clock was wrong at the reset
    own numbers continue from the seconds since 1970      above any used number, see `node/storage/identity_backup.py`
    own numbers continue above those in the event log     holds even if the clock was set back
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from ftis_node.replay.database import SCHEMA_VERSION, open_writer, transaction
from ftis_node.replay.lifecycle import ReleaseReason, State
from ftis_node.replay.rows import NOTED, REASONS
from ftis_node.replay.side_tables import LAST_NUMBER, SKIPPED_NUMBERS, forget, is_forgotten, position_of, read_total

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable
    from pathlib import Path

    from ftis_node.telemetry.event_log_summary import EventLogSummary, LoggedGroup

RESET_AT = "reset_at"  # in `totals`
COLUMNS = {  # of the current schema, by table
    "groups": {*NOTED, "arrival", "state", "reason", "step", "envelope", "checksum", "failed_steps", "num_bytes"},
    "forgotten": {"sender", "first", "last", "touched"},
    "totals": {"name", "value"},
}


class LostCommits(NamedTuple):
    """Differences between the event log and the buffer: missing groups, wrong states, the last own sequence number."""

    num_missing: int = 0
    num_wrong: int = 0
    last_number: int = 0

    def __str__(self) -> str:
        return (
            f"by the event log, {self.num_missing} groups are missing, {self.num_wrong} have a wrong state, and own "
            f"groups are numbered up to {self.last_number}"
        )


def missing_columns(buffer: sqlite3.Connection) -> str:
    """Return the first column that is missing, because a flipped bit changed its name; "" if all are there."""
    if not _is_present_schema(buffer):
        return ""
    for table, columns in COLUMNS.items():
        names = {name for (name,) in buffer.execute("SELECT name FROM pragma_table_info(?)", (table,))}
        if missing := sorted(columns - names):
            return f"table {table} has no column {missing[0]}"
    return ""


def find_lost_commits(buffer: sqlite3.Connection, record: EventLogSummary) -> LostCommits | None:
    """Return the commits that the event log records and the buffer lacks; None if it has all of them.

    An event is written after its commit, so a sound buffer is never behind the event log.
    """
    if not _is_present_schema(buffer):
        return None
    num_missing = sum(_is_missing(buffer, group) for group in record.expected)  # neither stored nor recorded as pruned
    num_wrong = sum(_contradicts(buffer, group) for group in record.used)
    is_ready = "SELECT count(*) FROM groups WHERE id = ? AND state = ?"
    num_wrong += sum(buffer.execute(is_ready, (group_id, State.READY)).fetchone()[0] for group_id, _ in record.released)
    is_behind = record.last_number > read_total(buffer, LAST_NUMBER)
    return LostCommits(num_missing, num_wrong, record.last_number) if num_missing or num_wrong or is_behind else None


def write_empty_buffer(path: Path, *, record: EventLogSummary) -> None:
    """Write an empty buffer at `path` that rejects all earlier groups of peers, and the groups of `record`.

    The next own group gets a sequence number above those of `record` and above the seconds since 1970. The position in
    the prompt order continues after the last own group of `record`.
    """
    now = int(time.time())
    last_number = max(now, record.last_number)
    skipped = last_number - position_of(record.last_number, record.skipped_numbers)
    totals = [(LAST_NUMBER, last_number), (SKIPPED_NUMBERS, skipped), (RESET_AT, now + 1)]
    with closing(open_writer(path)) as buffer:
        with transaction(buffer):
            buffer.executemany("INSERT OR REPLACE INTO totals (name, value) VALUES (?, ?)", totals)
            _forget_absent(buffer, record.admitted)
        buffer.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def limit_reset_at(buffer: sqlite3.Connection) -> None:
    """Change a reset time in the future to now. The clock was ahead then, and peers' groups would be rejected."""
    latest = int(time.time()) + 1
    if read_reset_at(buffer) > latest:
        buffer.execute("UPDATE totals SET value = ? WHERE name = ?", (latest, RESET_AT))


def read_reset_at(buffer: sqlite3.Connection) -> float:
    """Return the Unix time of the last reset; 0 if there was none."""
    return float(read_total(buffer, RESET_AT))


def _forget_absent(buffer: sqlite3.Connection, logged: Iterable[LoggedGroup]) -> None:
    """Record the numbers of groups that are not stored. Runs inside a transaction."""
    for group in logged:
        if _is_missing(buffer, group):
            forget(buffer, group.sender, group.number, touch=0)


def _is_missing(buffer: sqlite3.Connection, group: LoggedGroup) -> bool:
    is_kept = buffer.execute("SELECT 1 FROM groups WHERE id = ?", (group.id,)).fetchone() is not None
    return not is_kept and not is_forgotten(buffer, group.sender, group.number)


def _is_present_schema(buffer: sqlite3.Connection) -> bool:
    return bool(buffer.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION)


def _contradicts(buffer: sqlite3.Connection, used: LoggedGroup) -> bool:
    """Return whether a used group is RELEASED for an unknown reason, or trained by a later step.

    If the learner resumed before that later step, the group would be used again. An earlier step does no harm:
    `apply_checkpoint` sets it. A used group that is READY is no contradiction either: the learner may have resumed
    from an older checkpoint.
    """
    row = buffer.execute("SELECT state, reason, step FROM groups WHERE id = ?", (used.id,)).fetchone()
    if row is None or row[0] != State.RELEASED:
        return False
    if row[1] == ReleaseReason.TRAINED:
        return row[2] is None or row[2] > (used.step or 0)
    return row[1] not in REASONS
