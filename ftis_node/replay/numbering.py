"""Sequence numbers of own groups, and the position in the prompt order that follows from them.

Peers accept each number once. After a reset of the buffer or a restored identity, the last number is uncertain. Then
numbers continue at the seconds since 1970, and the buffer counts the skipped numbers. The position does not include
them. Nodes with the same prompt order thus stay at about the same prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

LAST_NUMBER, SKIPPED_NUMBERS = "last_number", "skipped_numbers"  # in `totals`
MAX_POSITION = 10**9  # no node makes so many groups: a higher last number contains seconds since 1970


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
