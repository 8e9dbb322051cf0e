"""A node's replay buffer as a watcher sees it: every row's standing in one transaction, nothing of the envelopes."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

BUSY_S = 20.0


@dataclass(frozen=True, slots=True)
class Row:
    """One group that is kept; `id` is hex."""

    id: str
    own: bool
    sender: str
    number: int
    state: str
    reason: str | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Buffer:
    """All rows, and the numbers of those that were pruned, as (first, last) by sender.

    `unsound` is what SQLite's own check says of the file, "" where it is sound.
    """

    rows: tuple[Row, ...] = ()
    forgotten: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    last_number: int = 0
    unsound: str = ""

    def has_forgotten(self, sender: str, number: int) -> bool:
        """Whether the sender's group of this number was here and was pruned."""
        return any(first <= number <= last for first, last in self.forgotten.get(sender, ()))


def read_buffer(path: Path) -> Buffer | None:
    """The buffer at `path`; None where there is none. One that cannot be read is told by its `unsound`."""
    if not path.exists():
        return None
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)
    except sqlite3.Error as error:
        return Buffer(unsound=str(error))
    try:
        connection.execute("BEGIN")
        return _read(connection)
    except sqlite3.Error as error:
        return Buffer(unsound=str(error))
    finally:
        connection.close()


def _read(connection: sqlite3.Connection) -> Buffer:
    rows = connection.execute("SELECT hex(id), own, sender, number, state, reason, step FROM groups ORDER BY arrival")
    groups = tuple(Row(name.lower(), bool(own), *rest) for name, own, *rest in rows)
    forgotten: dict[str, tuple[tuple[int, int], ...]] = {}
    for sender, first, last in connection.execute("SELECT sender, first, last FROM forgotten"):
        forgotten[sender] = (*forgotten.get(sender, ()), (first, last))
    totals = dict(connection.execute("SELECT name, value FROM totals"))
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    return Buffer(groups, forgotten, totals.get("last_number", 0), "" if verdict == "ok" else str(verdict))
