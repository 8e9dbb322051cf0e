"""Two tables beside the groups: totals by name, and the sequence numbers of pruned groups.

By the numbers of pruned groups, the node refuses an old envelope whose group it no longer stores. The table keeps the
most recently pruned ones. An older group is still refused because of its age.
"""

from __future__ import annotations

import sqlite3

LAST_NUMBER, PROMPT_POSITION, RESET_AT = "last_number", "prompt_position", "reset_at"  # in `totals`
FORGOTTEN_SCHEMA = """
CREATE TABLE IF NOT EXISTS forgotten (
    sender  TEXT NOT NULL,
    number  INTEGER NOT NULL,
    touched INTEGER NOT NULL,
    PRIMARY KEY (sender, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS forgotten_by_touch ON forgotten (touched);
"""
MAX_FORGOTTEN = 65_536  # about 10 MB on disk


def is_forgotten(db: sqlite3.Connection, sender: str, number: int) -> bool:
    """Return whether a pruned group of the sender had this number."""
    query = "SELECT 1 FROM forgotten WHERE sender = ? AND number = ?"
    return db.execute(query, (sender, number)).fetchone() is not None


def forget(db: sqlite3.Connection, sender: str, number: int, *, touch: int) -> None:
    """Record that the sender's group with this number is pruned; `touch` orders the calls. Use a transaction."""
    db.execute("INSERT OR IGNORE INTO forgotten VALUES (?, ?, ?)", (sender, number, touch))


def trim(db: sqlite3.Connection) -> None:
    """Delete the rows beyond `MAX_FORGOTTEN`, the least recently touched first. Use a transaction."""
    excess = db.execute("SELECT count(*) FROM forgotten").fetchone()[0] - MAX_FORGOTTEN
    if excess > 0:
        oldest = "SELECT sender, number FROM forgotten ORDER BY touched LIMIT ?"
        db.execute(f"DELETE FROM forgotten WHERE (sender, number) IN ({oldest})", (excess,))


def read_total(db: sqlite3.Connection, name: str) -> int:
    row = db.execute("SELECT value FROM totals WHERE name = ?", (name,)).fetchone()
    return int(row[0]) if row else 0
