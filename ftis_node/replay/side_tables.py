"""Two tables beside the groups: their counts, and the sequence numbers of pruned groups.

**Counts** are by origin, state and release reason. The status reads them every second, in the thread that also commits
groups, and counting 100,000 rows takes 0.3 s. So triggers update them in the transaction that changes a group.

**Sequence numbers** of own groups give the position in the prompt order. After a reset of the buffer or a restored
identity, the last number is uncertain. Then numbers continue at the seconds since 1970, and the buffer counts the
skipped numbers. The position does not include them, so nodes with the same prompt order stay at about the same prompt.

By the numbers of pruned groups, the node rejects an old envelope whose group it no longer stores. They are stored as
intervals of each sender. A sender's groups are pruned roughly in order, so its intervals merge into one or two rows. If
a sender leaves many gaps, the lowest are closed: their numbers then count as used. The least recently updated rows are
deleted first. A group whose row was deleted is still rejected because of its age.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import sqlite3

COUNTS_SCHEMA = """
CREATE TABLE IF NOT EXISTS counts (
    own        INTEGER NOT NULL,
    state      TEXT NOT NULL,
    reason     TEXT NOT NULL,
    num_groups INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    num_bytes  INTEGER NOT NULL,
    PRIMARY KEY (own, state, reason)
) STRICT, WITHOUT ROWID;
"""
_PLACE = "own = {row}.own AND state = {row}.state AND reason = coalesce({row}.reason, '')"
_MAKE = (
    "INSERT INTO counts SELECT new.own, new.state, coalesce(new.reason, ''), 0, 0, 0"
    f" WHERE NOT EXISTS (SELECT 1 FROM counts WHERE {_PLACE.format(row='new')});"
)
_CHANGE = (
    "UPDATE counts SET num_groups = num_groups {sign} 1, num_tokens = num_tokens {sign} {row}.num_tokens,"
    f" num_bytes = num_bytes {{sign}} length({{row}}.envelope) WHERE {_PLACE};"
)
_ADD, _TAKE = _MAKE + _CHANGE.format(sign="+", row="new"), _CHANGE.format(sign="-", row="old")
TRIGGERS = {
    "counts_admitted": f"AFTER INSERT ON groups BEGIN {_ADD} END",
    "counts_moved": f"AFTER UPDATE OF state, reason ON groups BEGIN {_TAKE} {_ADD} END",
    "counts_pruned": f"AFTER DELETE ON groups BEGIN {_TAKE} END",
}
BY_ROWS = (
    "SELECT own, state, coalesce(reason, '') AS reason, count(*) AS num_groups, sum(num_tokens) AS num_tokens,"
    " sum(length(envelope)) AS num_bytes FROM groups GROUP BY 1, 2, 3"
)
LAST_NUMBER, SKIPPED_NUMBERS = "last_number", "skipped_numbers"  # in `totals`
MAX_POSITION = 10**9  # no node makes so many groups: a higher last number contains seconds since 1970
FORGOTTEN_SCHEMA = """
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


class Count(NamedTuple):
    """Totals of the kept groups with one origin, state and reason. `reason` is empty if they are not released."""

    own: bool
    state: str
    reason: str
    num_groups: int
    num_tokens: int
    num_bytes: int


def start_counting(db: sqlite3.Connection) -> None:
    """Create the triggers, and count the rows that exist already. Call it outside of a transaction.

    This happens once per file, and again if the text of a trigger differs. SQLite's integrity check does not read that
    text, and a flipped bit in it makes the next insert fail.
    """
    present = dict(db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"))
    expected = {name: f"CREATE TRIGGER {name} {what}" for name, what in TRIGGERS.items()}
    if present == expected:
        return
    db.execute("BEGIN IMMEDIATE")  # no group may arrive between the count and the triggers
    db.execute(COUNTS_SCHEMA)
    for name in present:
        db.execute(f'DROP TRIGGER "{name}"')
    for text in expected.values():
        db.execute(text)
    db.execute("DELETE FROM counts")
    db.execute(f"INSERT INTO counts {BY_ROWS}")
    db.execute("COMMIT")


def read_counts(db: sqlite3.Connection) -> list[Count]:
    """Return all counts above 0. A file of an older version has no triggers; then the rows are counted."""
    query = "SELECT own, state, reason, num_groups, num_tokens, num_bytes FROM counts"
    present = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")}
    rows = db.execute(query if present.issuperset(TRIGGERS) else BY_ROWS)
    return [count for count in (Count(bool(own), *rest) for own, *rest in rows) if count.num_groups]


def kept_bytes(db: sqlite3.Connection) -> int:
    return sum(count.num_bytes for count in read_counts(db))


def is_forgotten(db: sqlite3.Connection, sender: str, number: int) -> bool:
    """Return whether a pruned group of the sender had this number, or a closed gap contains it."""
    query = "SELECT last FROM forgotten WHERE sender = ? AND first <= ? ORDER BY first DESC LIMIT 1"
    row = db.execute(query, (sender, number)).fetchone()
    return row is not None and bool(row[0] >= number)


def forget(db: sqlite3.Connection, sender: str, number: int, *, touch: int) -> None:
    """Record that the sender's group with this number is pruned; `touch` orders the calls. Use a transaction."""
    first = last = number
    neighbors = db.execute(
        "SELECT first, last FROM forgotten WHERE sender = ? AND first <= ? + 1 ORDER BY first DESC LIMIT 2",
        (sender, number),
    ).fetchall()
    for low, high in neighbors:
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
        for first, _ in rows[: excess + 1]:
            _drop(db, sender, first)
        _insert(db, sender, rows[0][0], rows[excess][1], touch)


def _insert(db: sqlite3.Connection, sender: str, first: int, last: int, touch: int) -> None:
    db.execute("INSERT INTO forgotten (sender, first, last, touched) VALUES (?, ?, ?, ?)", (sender, first, last, touch))


def _drop(db: sqlite3.Connection, sender: str, first: int) -> None:
    db.execute("DELETE FROM forgotten WHERE sender = ? AND first = ?", (sender, first))


def read_total(db: sqlite3.Connection, name: str) -> int:
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
