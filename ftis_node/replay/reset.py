"""Reset of the buffer: an empty buffer replaces a file that is damaged, missing, outdated or without its last commits.

Rollouts expire within `step.max_age_s`, so the rows of a damaged file are worth little. Two rules ensure that no group
is used twice and no sequence number is assigned twice:

    peers' groups from before the reset are refused      `reset_at` in `totals`
    the next start begins a new epoch of numbers          `node/storage/node_store.py`
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from ftis_node.config.home_files import MAX_EPOCH
from ftis_node.replay.database import (
    LAST_NUMBER,
    RESET_AT,
    SCHEMA_VERSION,
    is_forgotten,
    open_writer,
    read_total,
    transaction,
)
from ftis_node.replay.lifecycle import State
from ftis_node.replay.stored_rows import NOTED
from ftis_node.swarm.sequence import epoch_base, epoch_of
from ftis_node.telemetry.history import read_head

GROUP_ID = re.compile(r"[0-9a-f]{64}")

COLUMNS = {  # of the current schema, by table
    "groups": {*NOTED, "arrival", "state", "reason", "step", "envelope", "checksum", "failed_steps", "num_bytes"},
    "forgotten": {"sender", "number", "touched"},
    "totals": {"name", "value"},
}


def find_fault(buffer: sqlite3.Connection, *, epoch: int, last_events: Iterable[bytes]) -> str:
    """Return why a file that SQLite can read must not be used; "" if it is complete.

    `epoch` is that of the home's last start, `last_events` are the last lines of the event log.
    """
    version = buffer.execute("PRAGMA user_version").fetchone()[0]
    if version != SCHEMA_VERSION:  # 0 after an interrupted first write; others are refused
        return "it has no tables" if epoch and not version else ""
    for table, columns in COLUMNS.items():
        names = {name for (name,) in buffer.execute("SELECT name FROM pragma_table_info(?)", (table,))}
        if missing := sorted(columns - names):  # a flipped bit changed its name
            return f"table {table} has no column {missing[0]}"
    last_epoch = epoch_of(read_total(buffer, LAST_NUMBER))
    if last_epoch > MAX_EPOCH:
        return "its last number is no number of a group"
    if last_epoch < epoch:
        return "it is a copy from before the last start"
    return _lost_commit(buffer, last_events)


def _lost_commit(buffer: sqlite3.Connection, last_events: Iterable[bytes]) -> str:
    """Return a commit that the event log records and the buffer lacks, as after damage to the write-ahead log.

    An event is written after its commit, so a complete buffer is never behind the event log. A start has applied the
    whole write-ahead log, so only later commits can be lost. Lost steps make their groups READY again. Epochs protect
    the numbers, not the groups: without this check a group whose use was lost would be trained twice.
    """
    admitted: dict[str, tuple[str, int]] = {}
    gone: set[str] = set()  # taken or released
    for head in filter(None, map(read_head, last_events)):
        if head.group and not GROUP_ID.fullmatch(head.group):  # a damaged line
            continue
        if head.event == "start" or (head.event == "recovered" and head.file == "replay.sqlite"):
            admitted.clear()
        if head.event in ("start", "recovered", "step_lost"):
            gone.clear()
        elif head.group and head.event == "admitted":
            admitted[head.group] = head.sender, head.number
        elif head.group and head.event in ("taken", "released"):
            gone.add(head.group)
    for group, (sender, number) in admitted.items():
        if _state_of(buffer, group) is None and not is_forgotten(buffer, sender, number):
            return f"the event log has group {group[:12]}, which is missing"
    for group in gone:
        if _state_of(buffer, group) == State.READY:
            return f"the event log has the use of group {group[:12]}, which is not recorded"
    return ""


def _state_of(buffer: sqlite3.Connection, group: str) -> str | None:
    row = buffer.execute("SELECT state FROM groups WHERE id = ?", (bytes.fromhex(group),)).fetchone()
    return None if row is None else str(row[0])


def write_empty_buffer(path: Path, *, epoch: int) -> None:
    """Write an empty buffer at `path` that refuses all earlier groups of peers. Numbers begin after `epoch`."""
    totals = {LAST_NUMBER: epoch_base(epoch), RESET_AT: int(time.time()) + 1}
    with closing(open_writer(path)) as buffer:
        with transaction(buffer):
            buffer.executemany("INSERT OR REPLACE INTO totals (name, value) VALUES (?, ?)", totals.items())
        buffer.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def limit_reset_at(buffer: sqlite3.Connection) -> None:
    """Change a reset time in the future to now. The clock was ahead then, and peers' groups would be refused."""
    latest = int(time.time()) + 1
    buffer.execute("UPDATE totals SET value = min(value, ?) WHERE name = ?", (latest, RESET_AT))
