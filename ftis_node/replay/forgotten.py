"""Running numbers of pruned groups: an old envelope is refused although its group is no longer kept.

The numbers of each sender are kept as intervals. They merge as its groups come and go roughly in order, so a peer
costs a row or two however much it sends. If a sender leaves many gaps, the lowest are closed: old numbers then count as
used. The total of rows is bounded; the least recently touched go first. A group forgotten so is still refused by its
age.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

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
MAX_INTERVALS = 65_536  # about 10 MB of file


def is_forgotten(db: sqlite3.Connection, sender: str, number: int) -> bool:
    """Whether a group of the sender with this number was here and was pruned."""
    query = "SELECT last FROM forgotten WHERE sender = ? AND first <= ? ORDER BY first DESC LIMIT 1"
    row = db.execute(query, (sender, number)).fetchone()
    return row is not None and bool(row[0] >= number)


def forget(db: sqlite3.Connection, sender: str, number: int, *, touch: int) -> None:
    """Notes that the sender's group of this number is pruned; `touch` orders the calls. Inside a transaction."""
    first = last = number
    neighbours = db.execute(
        "SELECT first, last FROM forgotten WHERE sender = ? AND first <= ? + 1 ORDER BY first DESC LIMIT 2",
        (sender, number),
    ).fetchall()
    for low, high in neighbours:
        if high >= number - 1:  # it holds the number, or ends or begins beside it
            first, last = min(first, low), max(last, high)
            _drop(db, sender, low)
    _insert(db, sender, first, last, touch)
    _close_gaps(db, sender, touch=touch)


def trim(db: sqlite3.Connection) -> None:
    """Drops the rows longest untouched beyond the bound on all. Inside a transaction."""
    excess = db.execute("SELECT count(*) FROM forgotten").fetchone()[0] - MAX_INTERVALS
    if excess > 0:
        oldest = db.execute("SELECT sender, first FROM forgotten ORDER BY touched LIMIT ?", (excess,)).fetchall()
        for sender, first in oldest:
            _drop(db, sender, first)


def _close_gaps(db: sqlite3.Connection, sender: str, *, touch: int) -> None:
    """Joins the sender's lowest intervals beyond the bound on one sender."""
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
