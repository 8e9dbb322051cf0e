"""Looking into the buffer without owning it: for the door, the served store, the status and the command line.

One read-only connection; every method is one indexed query. Works beside a running node and on a stopped one's home.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftis_node.replay.database import open_reader

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Sequence
    from pathlib import Path

SUMMARY_COLUMNS = (
    "id, own, sender, number, state, reason, step, task, prompt_index, model, policy_version, created_at,"
    " admitted_at, num_tokens, rewards"
)
MIN_ID_PREFIX = 4


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One group as `replay list` shows it."""

    id: str
    own: bool
    sender: str
    number: int
    state: str
    reason: str | None
    step: int | None
    task: str
    prompt_index: int
    model: str
    policy_version: int
    created_at: float
    admitted_at: float
    num_tokens: int
    rewards: list[float]


@dataclass(frozen=True, slots=True)
class BufferFigures:
    """Counts over the whole buffer, with what was pruned since the home was made."""

    ready: int
    taken: int
    released: dict[str, int]
    tokens: int
    disk_bytes: int
    groups_own: int
    groups_foreign: int
    tokens_own: int
    tokens_foreign: int
    trained_own: int
    trained_foreign: int


class ReplayReader:
    """Read-only queries on a replay buffer."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where there is no buffer at `path`."""
        self._path = path
        self._db = open_reader(path)

    def close(self) -> None:
        """Closes the connection."""
        self._db.close()

    def is_known(self, group_id: bytes) -> bool:
        """Whether the group was admitted and is still kept."""
        return self._db.execute("SELECT 1 FROM groups WHERE id = ?", (group_id,)).fetchone() is not None

    def is_own(self, group_id: bytes) -> bool:
        """Whether this node made the group and still keeps it."""
        return self._db.execute("SELECT 1 FROM groups WHERE id = ? AND own = 1", (group_id,)).fetchone() is not None

    def has_number(self, sender: str, number: int) -> bool:
        """Whether a group with this running number of the sender was admitted and is still kept."""
        found = self._db.execute("SELECT 1 FROM groups WHERE sender = ? AND number = ?", (sender, number))
        return found.fetchone() is not None

    def envelopes(self, ids: Sequence[bytes]) -> list[bytes]:
        """The envelopes of those groups that are kept, as first signed, in the order asked for."""
        found = (
            self._db.execute("SELECT envelope FROM groups WHERE id = ?", (group_id,)).fetchone() for group_id in ids
        )
        return [row["envelope"] for row in found if row]

    def newest_own(self, limit: int) -> list[bytes]:
        """Envelopes of this node's newest groups, oldest of them first."""
        rows = self._db.execute("SELECT envelope FROM groups WHERE own = 1 ORDER BY arrival DESC LIMIT ?", (limit,))
        return [row["envelope"] for row in rows][::-1]

    def own_held(self) -> int:
        """Own groups that are READY or TAKEN: each holds a slot."""
        rows = self._db.execute("SELECT count(*) AS n FROM groups WHERE own = 1 AND state IN ('ready', 'taken')")
        return int(rows.fetchone()["n"])

    def ready_counts(self) -> tuple[int, int]:
        """READY groups: (own, foreign)."""
        rows = self._db.execute("SELECT own, count(*) AS n FROM groups WHERE state = 'ready' GROUP BY own")
        counts = {row["own"]: row["n"] for row in rows}
        return counts.get(1, 0), counts.get(0, 0)

    def list_groups(self, *, limit: int, state: str | None = None) -> list[GroupSummary]:
        """The newest groups first, only those in `state` where given."""
        where, arguments = ("WHERE state = ?", [state]) if state else ("", [])
        rows = self._db.execute(
            f"SELECT {SUMMARY_COLUMNS} FROM groups {where} ORDER BY arrival DESC LIMIT ?", [*arguments, limit]
        )
        return [_summary(row) for row in rows]

    def find(self, id_prefix: str) -> tuple[GroupSummary, bytes] | None:
        """The one group whose hex id begins so, with its envelope; None where none or several do."""
        if len(id_prefix) < MIN_ID_PREFIX or not set(id_prefix.lower()) <= set("0123456789abcdef"):
            return None
        rows = self._db.execute(
            f"SELECT {SUMMARY_COLUMNS}, envelope FROM groups WHERE hex(id) LIKE ? LIMIT 2", (id_prefix.upper() + "%",)
        ).fetchall()
        return (_summary(rows[0]), rows[0]["envelope"]) if len(rows) == 1 else None

    def all_groups(self) -> Iterator[tuple[GroupSummary, bytes]]:
        """Every kept group with its envelope, oldest first."""
        for row in self._db.execute(f"SELECT {SUMMARY_COLUMNS}, envelope FROM groups ORDER BY arrival"):
            yield _summary(row), row["envelope"]

    def figures(self) -> BufferFigures:
        """The buffer in numbers."""
        states = {
            row["state"]: row["n"] for row in self._db.execute("SELECT state, count(*) n FROM groups GROUP BY state")
        }
        reasons = self._db.execute("SELECT reason, count(*) n FROM groups WHERE reason IS NOT NULL GROUP BY reason")
        forgotten = {row["name"]: row["value"] for row in self._db.execute("SELECT name, value FROM totals")}
        return BufferFigures(
            ready=states.get("ready", 0),
            taken=states.get("taken", 0),
            released={row["reason"]: row["n"] for row in reasons},
            tokens=self._sum("num_tokens", "state != 'released'"),
            disk_bytes=sum(file.stat().st_size for file in self._path.parent.glob(self._path.name + "*")),
            **{
                f"{what}_{origin}": self._sum(expression, f"own = {own}")
                + forgotten.get(f"forgotten_{what}_{origin}", 0)
                for what, expression in (("groups", "1"), ("tokens", "num_tokens"), ("trained", "reason IS 'trained'"))
                for origin, own in (("own", 1), ("foreign", 0))
            },
        )

    def _sum(self, expression: str, where: str) -> int:
        query = f"SELECT coalesce(sum({expression}), 0) AS total FROM groups WHERE {where}"
        return int(self._db.execute(query).fetchone()["total"])


def _summary(row: sqlite3.Row) -> GroupSummary:
    fields: dict[str, Any] = {key: row[key] for key in GroupSummary.__slots__}
    fields.update(id=row["id"].hex(), own=bool(row["own"]), rewards=json.loads(row["rewards"]))
    return GroupSummary(**fields)
