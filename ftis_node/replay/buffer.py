"""The durable replay buffer: admission, choosing a step's groups, release. Each method is one transaction.

Everything here blocks on the disk: the daemon calls it in one thread of its own. `lifecycle.py` draws the states.
"""

from __future__ import annotations

import json
import sqlite3
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ftis_node.records.codec import unpack_group
from ftis_node.records.envelope import open_envelope
from ftis_node.records.text_codec import unpack_text_group
from ftis_node.replay.database import open_writer
from ftis_node.replay.lifecycle import Candidate, Freshness, ReleaseReason, State, choose_newest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ftis_node.records.envelope import Accepted
    from ftis_node.records.group import Group
    from ftis_node.replay.lifecycle import ChoiceRule


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group taken for a step: as received, with the rewards scored here and the prompt made here.

    Of a group that came as text, `group` has the tokens given to it at the door, and mean log-probs only.
    """

    id: bytes
    own: bool
    group: Group
    rewards: tuple[float, ...]
    prompt_ids: tuple[int, ...]


class Taken(NamedTuple):
    """The groups of a step, and what was given up unused when they were chosen."""

    groups: list[StoredGroup]
    discarded: list[Candidate]


class ReplayBuffer:
    """Groups on disk, own and foreign, from admission to release."""

    def __init__(self, path: Path) -> None:
        """Opens or makes the file. Raises ConfigError for a damaged one."""
        self._db = open_writer(path)

    def close(self) -> None:
        """Closes the file; everything acknowledged is on disk already."""
        self._db.close()

    def admit(self, accepted: Accepted, *, own: bool) -> bool:
        """WAITING -> READY. On disk when it returns. False where the group or its number is there already."""
        group = accepted.group
        try:
            with self._transaction():
                self._db.execute(
                    "INSERT INTO groups (id, own, sender, number, state, task, prompt_index, model, policy_version,"
                    " created_at, admitted_at, num_tokens, rewards, prompt_ids, envelope, text_token_ids)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        accepted.envelope.id,
                        int(own),
                        group.sender,
                        group.number,
                        State.READY,
                        group.prompt_ref.task,
                        group.prompt_ref.index,
                        group.model,
                        group.policy_version,
                        group.created_at,
                        time.time(),
                        group.num_tokens,
                        json.dumps(group.rewards),
                        np.asarray(accepted.prompt_ids, dtype="<i4").tobytes(),
                        accepted.envelope_bytes,
                        _text_token_ids(accepted),
                    ),
                )
                if own:
                    self._add("last_number", group.number - self.last_number())
        except sqlite3.IntegrityError:
            return False
        return True

    def take(self, step: int, *, own: int, foreign: int, rule: ChoiceRule = choose_newest) -> Taken:
        """READY -> TAKEN: up to `own` own and `foreign` foreign groups for optimiser step `step`, chosen by `rule`.

        What the rule passed over: READY -> RELEASED(discarded).
        """
        with self._transaction():
            selection = rule(self._candidates(), own, foreign)
            self._db.executemany(
                "UPDATE groups SET state = ?, step = ? WHERE id = ?",
                [(State.TAKEN, step, candidate.id) for candidate in selection.taken],
            )
            self._set_released(selection.discarded, ReleaseReason.DISCARDED)
        return Taken([self._load(candidate.id) for candidate in selection.taken], list(selection.discarded))

    def release_step(self, step: int, reason: ReleaseReason) -> int:
        """TAKEN -> RELEASED for all groups of a step; returns how many."""
        with self._transaction():
            done = self._db.execute(
                "UPDATE groups SET state = ?, reason = ? WHERE state = ? AND step = ?",
                (State.RELEASED, reason, State.TAKEN, step),
            )
        return done.rowcount

    def release_stale(self, freshness: Freshness) -> list[Candidate]:
        """READY -> RELEASED(stale) for groups that have aged out; returns them."""
        stale = [candidate for candidate in self._candidates() if freshness.is_stale(candidate)]
        self._release(stale, ReleaseReason.STALE)
        return stale

    def evict_foreign(self, *, keep: int) -> list[Candidate]:
        """READY -> RELEASED(evicted) for the oldest foreign groups beyond `keep`; returns them."""
        foreign = sorted((c for c in self._candidates() if not c.own), key=lambda c: (c.created_at, c.arrival))
        evicted = foreign[: max(0, len(foreign) - keep)]
        self._release(evicted, ReleaseReason.EVICTED)
        return evicted

    def reconcile(self, step: int, last_groups: Sequence[bytes] | None = None) -> int:
        """Sets the groups right with the learner's checkpoint at `step`; returns how many are READY again.

        Taken by a step that the checkpoint holds: trained. Taken or trained by a later one: that work is lost, so they
        are READY again. `last_groups` are those that `step` took by the checkpoint's own word: where the buffer has it
        otherwise (a buffer or a checkpoint from a backup), the checkpoint is believed, for it has the weights.
        """
        with self._transaction():
            strayed = 0 if last_groups is None else self._believe(step, last_groups)
            self._db.execute(
                "UPDATE groups SET state = ?, reason = ? WHERE state = ? AND step <= ?",
                (State.RELEASED, ReleaseReason.TRAINED, State.TAKEN, step),
            )
            undone = self._db.execute(
                "UPDATE groups SET state = ?, reason = NULL, step = NULL WHERE step > ? AND (state = ? OR reason = ?)",
                (State.READY, step, State.TAKEN, ReleaseReason.TRAINED),
            )
        return undone.rowcount + strayed

    def _believe(self, step: int, ids: Sequence[bytes]) -> int:
        """Makes `ids` the groups that `step` trained, and no others; returns how many of the others are READY again."""
        trained = (State.RELEASED, ReleaseReason.TRAINED)
        rows = self._db.execute(
            "SELECT id FROM groups WHERE step = ? AND (state = ? OR reason = ?)",
            (step, State.TAKEN, ReleaseReason.TRAINED),
        )
        strayed = {row["id"] for row in rows} - set(ids)
        self._db.executemany(
            "UPDATE groups SET state = ?, reason = NULL, step = NULL WHERE id = ?",
            [(State.READY, group_id) for group_id in strayed],
        )
        self._db.executemany(
            "UPDATE groups SET state = ?, reason = ?, step = ? WHERE id = ? AND (state != ? OR reason = ?)",
            [(*trained, step, group_id, *trained) for group_id in ids],
        )
        return len(strayed)

    def prune(self, *, max_disk_bytes: int, saved_step: int | None = None) -> int:
        """Deletes the oldest RELEASED groups until the kept envelopes fit `max_disk_bytes`; returns how many went.

        Groups of steps after `saved_step`, the newest checkpoint's, stay: a learner that dies needs them again.
        """
        with self._transaction():
            excess = self._db.execute("SELECT coalesce(sum(length(envelope)), 0) FROM groups").fetchone()[0]
            doomed = []
            for row in self._db.execute(
                "SELECT arrival, own, reason, num_tokens, length(envelope) AS size FROM groups WHERE state = ?"
                " AND (? IS NULL OR step IS NULL OR step <= ?) ORDER BY arrival",
                (State.RELEASED, saved_step, saved_step),
            ):
                if (excess := excess - row["size"]) + row["size"] <= max_disk_bytes:
                    break
                doomed.append(row)
            for row in doomed:
                self._forget(row)
        return len(doomed)

    def last_number(self) -> int:
        """The running number of this node's newest group; 0 before the first."""
        row = self._db.execute("SELECT value FROM totals WHERE name = 'last_number'").fetchone()
        return int(row["value"]) if row else 0

    def _forget(self, row: sqlite3.Row) -> None:
        """Deletes one row, keeping it in the totals that the status shows."""
        origin = "own" if row["own"] else "foreign"
        self._add(f"forgotten_groups_{origin}", 1)
        self._add(f"forgotten_tokens_{origin}", row["num_tokens"])
        if row["reason"] == ReleaseReason.TRAINED:
            self._add(f"forgotten_trained_{origin}", 1)
        self._db.execute("DELETE FROM groups WHERE arrival = ?", (row["arrival"],))

    def _release(self, groups: Sequence[Candidate], reason: ReleaseReason) -> None:
        if groups:
            with self._transaction():
                self._set_released(groups, reason)

    def _set_released(self, groups: Sequence[Candidate], reason: ReleaseReason) -> None:
        self._db.executemany(
            "UPDATE groups SET state = ?, reason = ? WHERE id = ?",
            [(State.RELEASED, reason, group.id) for group in groups],
        )

    def _candidates(self) -> list[Candidate]:
        rows = self._db.execute(
            "SELECT id, sender, own, arrival, created_at, policy_version, task, prompt_index, rewards"
            " FROM groups WHERE state = ?",
            (State.READY,),
        )
        return [
            Candidate(
                id=row["id"],
                sender=row["sender"],
                own=bool(row["own"]),
                arrival=row["arrival"],
                created_at=row["created_at"],
                policy_version=row["policy_version"],
                task=row["task"],
                prompt_index=row["prompt_index"],
                rewards=tuple(json.loads(row["rewards"])),
            )
            for row in rows
        ]

    def _load(self, group_id: bytes) -> StoredGroup:
        row = self._db.execute(
            "SELECT own, rewards, prompt_ids, envelope, text_token_ids FROM groups WHERE id = ?", (group_id,)
        ).fetchone()
        return StoredGroup(
            id=group_id,
            own=bool(row["own"]),
            group=_stored_group(row),
            rewards=tuple(json.loads(row["rewards"])),
            prompt_ids=tuple(np.frombuffer(row["prompt_ids"], dtype="<i4").tolist()),
        )

    def _add(self, name: str, amount: int) -> None:
        self._db.execute(
            "INSERT INTO totals (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + ?",
            (name, amount, amount),
        )

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)


def _text_token_ids(accepted: Accepted) -> str | None:
    """The tokens that we gave to the texts of a group told so; None for an exact one, which brings its own."""
    if accepted.retells is None:
        return None
    return json.dumps([completion.token_ids.tolist() for completion in accepted.group.completions])


def _stored_group(row: sqlite3.Row) -> Group:
    body = open_envelope(row["envelope"]).body
    if row["text_token_ids"] is None:
        return unpack_group(body)
    return unpack_text_group(body).in_tokens(json.loads(row["text_token_ids"]))


class _Transaction:
    """BEGIN IMMEDIATE ... COMMIT, or ROLLBACK where the block raised."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._connection.execute("ROLLBACK" if kind else "COMMIT")
