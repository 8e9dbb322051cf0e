"""Snapshots of a node's replay buffer, each in one transaction and without envelopes, and of its bans."""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

BUSY_S = 20.0


@dataclass(frozen=True, slots=True)
class Row:
    """One stored group; `id` is hex."""

    id: str
    own: bool
    sender: str
    number: int
    state: str
    reason: str | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Buffer:
    """All rows, and the sequence numbers of pruned groups as (first, last) by sender.

    `integrity_error` is the result of SQLite's check of the file, or "".
    """

    rows: tuple[Row, ...] = ()
    pruned: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    last_number: int = 0
    integrity_error: str = ""

    def has_pruned(self, sender: str, number: int) -> bool:
        return any(first <= number <= last for first, last in self.pruned.get(sender, ()))


def read_buffer(path: Path) -> Buffer | None:
    """Return the buffer at `path`, or None. An unreadable file gives a buffer with an `integrity_error`."""
    if not path.exists():
        return None
    try:
        with closing(_opened(path)) as connection:
            connection.execute("BEGIN")
            return _read(connection)
    except sqlite3.Error as error:
        return Buffer(integrity_error=str(error))


def _read(connection: sqlite3.Connection) -> Buffer:
    rows = connection.execute("SELECT hex(id), own, sender, number, state, reason, step FROM groups ORDER BY arrival")
    groups = tuple(Row(name.lower(), bool(own), *rest) for name, own, *rest in rows)
    pruned: dict[str, tuple[tuple[int, int], ...]] = {}
    for sender, number in connection.execute("SELECT sender, number FROM forgotten"):
        pruned[sender] = (*pruned.get(sender, ()), (number, number))
    totals = dict(connection.execute("SELECT name, value FROM totals"))
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    return Buffer(groups, pruned, totals.get("last_number", 0), "" if verdict == "ok" else str(verdict))


def read_bans(path: Path) -> dict[str, float]:
    """Return the banned peers in the database at `path` with the ends of their bans; nothing if it is unreadable."""
    try:
        with closing(_opened(path)) as connection:
            return dict(connection.execute("SELECT peer_id, banned_until FROM peers WHERE banned_until > 0"))
    except sqlite3.Error:
        return {}


def _opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)
