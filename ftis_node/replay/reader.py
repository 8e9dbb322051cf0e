"""Read-only view of the buffer: for validation, for serving peers, for the status and the command line.

It works beside a running node and for a stopped one.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ftis_node.records.envelope import is_envelope_of
from ftis_node.records.peer_messages import BackfillRequest
from ftis_node.replay.database import (
    KEPT_BYTES,
    KEPT_GROUPS,
    LAST_NUMBER,
    RESET_AT,
    is_forgotten,
    open_reader,
    read_total,
)
from ftis_node.replay.lifecycle import ReleaseReason, State
from ftis_node.replay.stored_rows import rewards_of

HELD_COLUMNS = "id, own, sender, number, length(envelope) AS num_bytes, num_tokens, policy_version, created_at"
MIN_ID_PREFIX = 4


@dataclass(frozen=True, slots=True)
class GroupSummary:
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

    @property
    def reward_mean(self) -> float:
        return sum(self.rewards) / len(self.rewards) if self.rewards else 0.0


SUMMARY_COLUMNS = ", ".join(GroupSummary.__slots__)


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """Header data of a stored group for peers that may request it. `num_bytes` is the size of its envelope."""

    id: bytes
    own: int
    sender: str
    number: int
    num_bytes: int
    num_tokens: int
    policy_version: int
    created_at: float


@dataclass(frozen=True, slots=True)
class BufferFigures:
    """Totals of the buffer.

    `groups_*`, `tokens_*` and `trained_*` include pruned groups, the others do not. `tokens` counts completion tokens
    of READY and TAKEN groups.
    """

    ready: int
    taken: int
    released: dict[str, int]
    tokens: int
    disk_bytes: int
    envelope_bytes: int
    ready_foreign_bytes: int
    groups_own: int
    groups_foreign: int
    tokens_own: int
    tokens_foreign: int
    trained_own: int
    trained_foreign: int
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class SenderGroups:
    """Stored groups of one sender; pruned groups are not included."""

    ready: int
    taken: int
    released: dict[str, int]
    tokens: int
    newest: list[GroupSummary]


class ReplayReader:
    def __init__(self, path: Path) -> None:
        """Open the buffer. Raises ConfigError if there is none at `path`."""
        self._path = path
        self._db = open_reader(path)

    def close(self) -> None:
        self._db.close()

    def is_known(self, group_id: bytes) -> bool:
        return self._value("SELECT 1 FROM groups WHERE id = ?", group_id) is not None

    def is_own(self, group_id: bytes) -> bool:
        return self._value("SELECT 1 FROM groups WHERE id = ? AND own = 1", group_id) is not None

    def has_number(self, sender: str, number: int) -> bool:
        """Return whether a group of the sender with this number was ever admitted, pruned ones included."""
        found = self._value("SELECT 1 FROM groups WHERE sender = ? AND number = ?", sender, number)
        return found is not None or is_forgotten(self._db, sender, number)

    def reset_at(self) -> float:
        """Return the Unix time of the last reset: older groups of peers are refused. 0 if there was no reset."""
        return float(read_total(self._db, RESET_AT))

    def envelopes(self, ids: Sequence[bytes]) -> list[bytes]:
        """Return the signed envelopes of those groups that are stored, in the order of `ids`.

        Envelopes that changed on disk are omitted, because a peer would blame the node that serves them.
        """
        found = ((group_id, self._value("SELECT envelope FROM groups WHERE id = ?", group_id)) for group_id in ids)
        return [envelope for group_id, envelope in found if envelope is not None and is_envelope_of(envelope, group_id)]

    def find_held(self, request: BackfillRequest, *, limit: int) -> list[HeldGroup]:
        """Return the stored groups that a peer requests, oldest first.

        Groups that arrived as text are omitted, because only their senders can serve them.
        """
        asked = "sender = coalesce(:sender, sender) AND number BETWEEN :first_number AND coalesce(:last_number, number)"
        rows = self._db.execute(
            f"SELECT {HELD_COLUMNS} FROM groups WHERE created_at > :since AND text_token_ids IS NULL AND {asked}"
            " ORDER BY created_at LIMIT :limit",
            asdict(request) | {"limit": limit},
        )
        return [HeldGroup(**dict(row)) for row in rows]

    def held(self, group_id: bytes) -> HeldGroup | None:
        row = self._db.execute(f"SELECT {HELD_COLUMNS} FROM groups WHERE id = ?", (group_id,)).fetchone()
        return None if row is None else HeldGroup(**dict(row))

    def last_number(self) -> int:
        """Return `ReplayBuffer.last_number` without a wait for a write."""
        return read_total(self._db, LAST_NUMBER)

    def own_held(self) -> int:
        """Return the number of own groups that are READY or TAKEN; each occupies a slot."""
        return int(self._value("SELECT count(*) FROM groups WHERE own = 1 AND state IN ('ready', 'taken')"))

    def last_step(self) -> int:
        """Return the largest step that took one of the stored groups, 0 if none did."""
        return int(self._value("SELECT coalesce(max(step), 0) FROM groups"))

    def own_ready(self) -> list[bytes]:
        rows = self._db.execute("SELECT id FROM groups WHERE own = 1 AND state = 'ready' ORDER BY arrival")
        return [row["id"] for row in rows]

    def ready_counts(self) -> tuple[int, int]:
        """Return the numbers of READY groups: (own, foreign)."""
        rows = self._db.execute("SELECT own, count(*) AS n FROM groups WHERE state = 'ready' GROUP BY own")
        counts = {row["own"]: row["n"] for row in rows}
        return counts.get(1, 0), counts.get(0, 0)

    def ready_foreign(self) -> list[tuple[str, int]]:
        rows = self._db.execute("SELECT sender, number FROM groups WHERE state = 'ready' AND own = 0")
        return [(row["sender"], row["number"]) for row in rows]

    def trained_tokens(self) -> int:
        """Return the completion tokens of all groups that steps have trained on, including pruned ones."""
        query = "SELECT sum(num_tokens) FROM groups WHERE state = 'released' AND own IN (0, 1) AND reason = 'trained'"
        stored = self._value(query) or 0  # with `own`, it reads no groups of peers that were released unused
        pruned = (read_total(self._db, f"forgotten_trained_tokens_{origin}") for origin in ("own", "foreign"))
        return int(stored) + sum(pruned)

    def ready_foreign_bytes(self) -> int:
        return self._value("SELECT sum(num_bytes) FROM groups WHERE state = 'ready' AND own = 0") or 0

    def list_groups(self, *, limit: int, state: str | None = None) -> list[GroupSummary]:
        where, arguments = ("WHERE state = ?", [state]) if state else ("", [])
        rows = self._db.execute(
            f"SELECT {SUMMARY_COLUMNS} FROM groups {where} ORDER BY arrival DESC LIMIT ?", [*arguments, limit]
        )
        return [_summary(row) for row in rows]

    def groups_of(self, sender: str, *, limit: int) -> SenderGroups:
        counts = self._db.execute(
            "SELECT state, reason, count(*) n, sum(num_tokens) tokens FROM groups WHERE sender = ?"
            " GROUP BY state, reason",
            (sender,),
        ).fetchall()
        rows = self._db.execute(
            f"SELECT {SUMMARY_COLUMNS} FROM groups WHERE sender = ? ORDER BY arrival DESC LIMIT ?", (sender, limit)
        )
        return SenderGroups(
            ready=sum(row["n"] for row in counts if row["state"] == "ready"),
            taken=sum(row["n"] for row in counts if row["state"] == "taken"),
            released={row["reason"]: row["n"] for row in counts if row["state"] == "released"},
            tokens=sum(row["tokens"] for row in counts),
            newest=[_summary(row) for row in rows],
        )

    def find(self, id_prefix: str) -> tuple[GroupSummary, bytes] | None:
        """Return the group whose hex id starts with `id_prefix`, and its envelope; None unless exactly one matches."""
        if len(id_prefix) < MIN_ID_PREFIX or not set(id_prefix.lower()) <= set("0123456789abcdef"):
            return None
        rows = self._db.execute(
            f"SELECT {SUMMARY_COLUMNS}, envelope FROM groups WHERE hex(id) LIKE ? LIMIT 2", (id_prefix.upper() + "%",)
        ).fetchall()
        return (_summary(rows[0]), rows[0]["envelope"]) if len(rows) == 1 else None

    def prompt_ids(self, group_id: bytes) -> tuple[int, ...]:
        """Return the prompt's token ids by this node's tokenizer; empty if the group is not stored."""
        stored = self._value("SELECT prompt_ids FROM groups WHERE id = ?", group_id)
        return tuple(np.frombuffer(stored or b"", dtype="<i4").tolist())

    def observation_ids(self, group_id: bytes) -> list[list[int]]:
        """Return the ids of a group's observations, completion by completion; empty without episodes."""
        stored = self._value("SELECT observation_ids FROM groups WHERE id = ?", group_id)
        ids: list[list[int]] = json.loads(stored or "[]")
        return ids

    def all_groups(self) -> Iterator[tuple[GroupSummary, bytes]]:
        for row in self._db.execute(f"SELECT {SUMMARY_COLUMNS}, envelope FROM groups ORDER BY arrival"):
            yield _summary(row), row["envelope"]

    def kept(self) -> tuple[int, int]:
        """Return the number of stored groups in all states, and the bytes of their envelopes."""
        return read_total(self._db, KEPT_GROUPS), read_total(self._db, KEPT_BYTES)

    def figures(self) -> BufferFigures:
        states, reasons, totals, tokens, envelope_bytes = Counter[str](), Counter[str](), Counter[str](), 0, 0
        for name, value in self._db.execute("SELECT name, value FROM totals"):  # those of pruned groups
            totals[name.removeprefix("forgotten_")] = value
        query = "SELECT state, own, reason, count(*), sum(num_tokens), sum(num_bytes) FROM groups GROUP BY 1, 2, 3"
        for state, is_own, reason, num_groups, num_tokens, num_bytes in self._db.execute(query):
            origin = "own" if is_own else "foreign"
            states[state] += num_groups
            reasons[reason] += num_groups
            totals[f"groups_{origin}"] += num_groups
            totals[f"tokens_{origin}"] += num_tokens
            if reason == ReleaseReason.TRAINED:
                totals[f"trained_{origin}"] += num_groups
                totals[f"trained_tokens_{origin}"] += num_tokens
            tokens += num_tokens if state != State.RELEASED else 0
            envelope_bytes += num_bytes
        return BufferFigures(
            ready=states[State.READY],
            taken=states[State.TAKEN],
            released={reason: num_groups for reason, num_groups in reasons.items() if reason},
            tokens=tokens,
            disk_bytes=sum(file.stat().st_size for file in self._path.parent.glob(self._path.name + "*")),
            envelope_bytes=envelope_bytes,
            ready_foreign_bytes=self.ready_foreign_bytes(),
            groups_own=totals["groups_own"],
            groups_foreign=totals["groups_foreign"],
            tokens_own=totals["tokens_own"],
            tokens_foreign=totals["tokens_foreign"],
            trained_own=totals["trained_own"],
            trained_foreign=totals["trained_foreign"],
            trained_tokens=totals["trained_tokens_own"] + totals["trained_tokens_foreign"],
        )

    def _value(self, query: str, *arguments: object) -> Any:
        """Return the only value that a query selects; None without a row."""
        row = self._db.execute(query, arguments).fetchone()
        return None if row is None else row[0]


def _summary(row: sqlite3.Row) -> GroupSummary:
    fields: dict[str, Any] = {key: row[key] for key in GroupSummary.__slots__}
    fields.update(id=row["id"].hex(), own=bool(row["own"]), rewards=list(rewards_of(row)))
    return GroupSummary(**fields)
