"""Sequence numbers of own groups, and the position in the prompt order that follows from them.

Peers accept each number once. After a reset of the buffer or a restored identity, the last number is uncertain. Then
numbers continue at the seconds since 1970, and the buffer counts the skipped numbers. The position does not include
them. Nodes with the same prompt order thus stay at about the same prompt.

Sequence numbers of pruned groups. The node uses them to reject an old envelope whose group it no longer stores.

The numbers of each sender are stored as intervals. A sender's groups arrive and are pruned roughly in order, so its
intervals merge into one or two rows. If a sender leaves many gaps, the lowest gaps are closed: their numbers then count
as used. The total number of rows is bounded; the least recently updated rows are deleted first. A group whose row was
deleted is still rejected because of its age.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

LAST_NUMBER, SKIPPED_NUMBERS = "last_number", "skipped_numbers"  # in `totals`
MAX_POSITION = 10**9  # no node makes so many groups: a higher last number contains seconds since 1970
SCHEMA = """
CREATE TABLE IF NOT EXISTS forgotten (
    sender  TEXT NOT NULL,
    first   INTEGER NOT NULL,
    last    INTEGER NOT NULL,
    touched INTEGER NOT NULL,
    PRIMARY KEY (sender, first)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS forgotten_by_touch ON forgotten (touched);
"""
MAX_INTERVALS_PER_SENDER = 64
MAX_INTERVALS = 65_536  # about 10 MB on disk


def is_forgotten(db: sqlite3.Connection, sender: str, number: int) -> bool:
    """Return whether a pruned group of the sender had this number, or a closed gap contains it."""
    query = "SELECT last FROM forgotten WHERE sender = ? AND first <= ? ORDER BY first DESC LIMIT 1"
    row = db.execute(query, (sender, number)).fetchone()
    return row is not None and bool(row[0] >= number)


def forget(db: sqlite3.Connection, sender: str, number: int, *, touch: int) -> None:
    """Record that the sender's group with this number is pruned; `touch` orders the calls. Use a transaction."""
    first = last = number
    neighbours = db.execute(
        "SELECT first, last FROM forgotten WHERE sender = ? AND first <= ? + 1 ORDER BY first DESC LIMIT 2",
        (sender, number),
    ).fetchall()
    for low, high in neighbours:
        if high >= number - 1:  # the interval contains the number or is adjacent to it
            first, last = min(first, low), max(last, high)
            _drop(db, sender, low)
    _insert(db, sender, first, last, touch)
    _close_gaps(db, sender, touch=touch)


def trim(db: sqlite3.Connection) -> None:
    """Delete the least recently updated rows beyond `MAX_INTERVALS`. Runs inside a transaction."""
    excess = db.execute("SELECT count(*) FROM forgotten").fetchone()[0] - MAX_INTERVALS
    if excess > 0:
        oldest = db.execute("SELECT sender, first FROM forgotten ORDER BY touched LIMIT ?", (excess,)).fetchall()
        for sender, first in oldest:
            _drop(db, sender, first)


def _close_gaps(db: sqlite3.Connection, sender: str, *, touch: int) -> None:
    """Merge the sender's lowest intervals until it has at most `MAX_INTERVALS_PER_SENDER`."""
    rows = db.execute("SELECT first, last FROM forgotten WHERE sender = ? ORDER BY first", (sender,)).fetchall()
    if excess := max(0, len(rows) - MAX_INTERVALS_PER_SENDER):
        for row in rows[: excess + 1]:
            _drop(db, sender, row[0])
        closed = (sender, rows[0][0], rows[excess][1], touch)
        _insert(db, *closed)


def _insert(db: sqlite3.Connection, sender: str, first: int, last: int, touch: int) -> None:
    row = (sender, first, last, touch)
    db.execute("INSERT INTO forgotten (sender, first, last, touched) VALUES (?, ?, ?, ?)", row)


def _drop(db: sqlite3.Connection, sender: str, first: int) -> None:
    db.execute("DELETE FROM forgotten WHERE sender = ? AND first = ?", (sender, first))


def read_total(db: sqlite3.Connection, name: str) -> int:
    """Return a value of `totals`; 0 if it is missing."""
    row = db.execute("SELECT value FROM totals WHERE name = ?", (name,)).fetchone()
    return int(row[0]) if row else 0


def position_of(last_number: int, skipped_numbers: int) -> int:
    """Return the position in the prompt order; 0 if the skipped numbers are unknown."""
    position = last_number - skipped_numbers
    return position if 0 <= position < MAX_POSITION else 0


def note_skipped(db: sqlite3.Connection) -> None:
    """Record the skipped numbers of a buffer that an older version has reset. Its position becomes 0."""
    last_number = read_total(db, LAST_NUMBER)
    if last_number >= MAX_POSITION:
        db.execute("INSERT OR IGNORE INTO totals (name, value) VALUES (?, ?)", (SKIPPED_NUMBERS, last_number))
