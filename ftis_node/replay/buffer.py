"""The durable replay buffer: admission, choosing a step's groups, release. Each method is one transaction.

Every method blocks on the disk, so the daemon calls them in one dedicated thread. `lifecycle.py` draws the states.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ftis_node.errors import FtisError
from ftis_node.records.envelope import open_envelope
from ftis_node.records.group import PromptRef
from ftis_node.replay.checksums import checksum_of, is_sound, release_damaged
from ftis_node.replay.counts import kept_bytes
from ftis_node.replay.database import Transaction, give_back_pages, open_writer
from ftis_node.replay.failures import note_failed, release_poisoned
from ftis_node.replay.forgotten import forget, is_forgotten, trim
from ftis_node.replay.lifecycle import Candidate, Freshness, ReleaseReason, State, choose_evicted, choose_newest
from ftis_node.replay.reconciliation import believe_checkpoint, claim_used
from ftis_node.replay.reset import limit_reset_at, read_reset_at
from ftis_node.swarm.reputation.rate_limits import ShareCap

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

    from ftis_node.records.envelope import Accepted
    from ftis_node.replay.lifecycle import ChoiceRule
    from ftis_node.telemetry.event_log_summary import LoggedGroup


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group taken for a step: the signed body, and this node's data on it.

    `rewards` are this node's. `prompt_ids` are little-endian int32. `text_token_ids` are this node's ids of the texts
    of a body in the text form, one tuple per completion. They are empty for a body with tokens.
    """

    id: bytes
    own: bool
    sender: str
    number: int
    prompt_ref: PromptRef
    weights_of: str | None
    rewards: tuple[float, ...]
    prompt_ids: bytes
    body: bytes
    text_token_ids: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def from_accepted(cls, accepted: Accepted, *, own: bool) -> StoredGroup:
        """Return an accepted group as the buffer would give it back."""
        group = accepted.group
        return cls(
            id=accepted.envelope.id,
            own=own,
            sender=group.sender,
            number=group.number,
            prompt_ref=group.prompt_ref,
            weights_of=group.weights_of,
            rewards=group.rewards,
            prompt_ids=np.asarray(accepted.prompt_ids, dtype="<i4").tobytes(),
            body=accepted.envelope.body,
            text_token_ids=_text_token_ids(accepted),
        )


class Taken(NamedTuple):
    """The groups of a step, and what was given up unused when they were chosen."""

    groups: list[StoredGroup]
    discarded: list[Candidate]


class ReplayBuffer:
    """Groups on disk, own and foreign, from admission to release."""

    def __init__(self, path: Path) -> None:
        """Opens or makes the file. Raises ConfigError for a damaged one."""
        self._db = open_writer(path)
        limit_reset_at(self._db)

    def close(self) -> None:
        """Closes the file; everything acknowledged is on disk already."""
        self._db.close()

    def admit(self, accepted: Accepted, *, own: bool) -> bool:
        """WAITING -> READY. On disk when it returns. False if the group or its number is or was there already."""
        return self.admit_many([(accepted, own)])[0]

    def admit_many(self, arrivals: Sequence[tuple[Accepted, bool]]) -> list[bool]:
        """As `admit` for each group and whether it is our own, in order, with one wait for the disk."""
        with self._transaction():
            return [self._insert(accepted, own=own) for accepted, own in arrivals]

    def _insert(self, accepted: Accepted, *, own: bool) -> bool:
        group = accepted.group
        is_before_reset = not own and group.created_at <= read_reset_at(self._db)
        if is_before_reset or is_forgotten(self._db, group.sender, group.number):
            return False
        row: dict[str, str | int | float | bytes | None] = {
            "id": accepted.envelope.id,
            "own": int(own),
            "sender": group.sender,
            "number": group.number,
            "task": group.prompt_ref.task,
            "prompt_index": group.prompt_ref.index,
            "model": group.model,
            "policy_version": group.policy_version,
            "created_at": float(group.created_at),
            "admitted_at": time.time(),
            "num_tokens": group.num_tokens,
            "rewards": json.dumps(group.rewards),
            "prompt_ids": np.asarray(accepted.prompt_ids, dtype="<i4").tobytes(),
            "text_token_ids": None if accepted.retells is None else json.dumps(_text_token_ids(accepted)),
            "weights_of": group.weights_of,
        }
        row |= {"checksum": checksum_of(row), "envelope": accepted.envelope_bytes, "state": State.READY}
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        query = f"INSERT INTO groups ({names}) VALUES ({marks}) ON CONFLICT DO NOTHING"
        done = self._db.execute(query, tuple(row.values()))
        if own and done.rowcount:
            self._add("last_number", group.number - self.last_number())
        return bool(done.rowcount)

    def take(self, step: int, *, own: int, foreign: int, rule: ChoiceRule = choose_newest) -> Taken:
        """READY -> TAKEN: up to `own` own and `foreign` foreign groups for optimizer step `step`, chosen by `rule`.

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

    def release_delivered(self, ids: Collection[bytes]) -> list[Candidate]:
        """READY -> RELEASED(delivered) for own groups with these ids; returns them."""
        delivered = [candidate for candidate in self._candidates() if candidate.own and candidate.id in ids]
        self._release(delivered, ReleaseReason.DELIVERED)
        return delivered

    def evict_foreign(
        self, *, keep: int, keep_bytes: int | None = None, cap: ShareCap | None = None
    ) -> list[Candidate]:
        """READY -> RELEASED(evicted) for foreign groups beyond `keep`, or `keep_bytes`, or their peer's places; returns
        them."""
        evicted = choose_evicted(self._candidates(), keep=keep, keep_bytes=keep_bytes, cap=cap or ShareCap())
        self._release(evicted, ReleaseReason.EVICTED)
        return evicted

    def release_audited(self, group_id: bytes) -> bool:
        """READY -> RELEASED(audit) for one group; False if it is READY no more."""
        with self._transaction():
            done = self._db.execute(
                "UPDATE groups SET state = ?, reason = ? WHERE id = ? AND state = ?",
                (State.RELEASED, ReleaseReason.AUDIT, group_id, State.READY),
            )
        return done.rowcount == 1

    def reconcile(self, step: int, last_groups: Sequence[bytes] | None = None) -> int:
        """Reconcile the groups with the learner's checkpoint at `step`; return how many are READY again.

        Groups of a step that the checkpoint includes become trained. Groups of a later step become READY again, because
        its work is lost. `last_groups` are those of `step`, as the checkpoint names them. If the buffer disagrees (one
        of them is from a backup), the checkpoint decides, because it has the weights.
        """
        with self._transaction():
            strayed = 0 if last_groups is None else believe_checkpoint(self._db, step, last_groups)
            self._db.execute(
                "UPDATE groups SET state = ?, reason = ? WHERE state = ? AND step <= ?",
                (State.RELEASED, ReleaseReason.TRAINED, State.TAKEN, step),
            )
            undone = self._db.execute(
                "UPDATE groups SET state = ?, reason = NULL, step = NULL WHERE step > ? AND (state = ? OR reason = ?)",
                (State.READY, step, State.TAKEN, ReleaseReason.TRAINED),
            )
        return undone.rowcount + strayed

    def note_failed(self, step: int) -> None:
        """The learner failed in `step`: counted for each of its groups, which stay TAKEN until `reconcile`."""
        with self._transaction():
            note_failed(self._db, step)

    def release_poisoned(self) -> list[bytes]:
        """READY -> RELEASED(poisoned) for groups that the learner failed on too often; returns their ids."""
        with self._transaction():
            return release_poisoned(self._db)

    def release_damaged(self) -> list[bytes]:
        """READY, TAKEN -> RELEASED(damaged) for groups that are not what was stored; returns their ids."""
        with self._transaction():
            return release_damaged(self._db)

    def claim_used(self, used: Iterable[LoggedGroup]) -> int:
        """READY -> TAKEN for groups that steps have used by the event log; returns how many there were."""
        with self._transaction():
            return claim_used(self._db, used)

    def prune(self, *, max_disk_bytes: int, saved_step: int | None = None) -> int:
        """Deletes the oldest RELEASED groups until the kept envelopes fit `max_disk_bytes`; returns how many went.

        Groups of steps after `saved_step`, the newest checkpoint's, stay: a learner that dies needs them again.
        """
        with self._transaction():
            kept = kept_bytes(self._db)
            doomed = []
            for row in self._oldest_released(saved_step) if kept > max_disk_bytes else ():
                if kept <= max_disk_bytes:
                    break
                doomed.append(row)
                kept -= row["size"]
            for row in doomed:
                self._forget(row)
            trim(self._db)
        return len(doomed)

    def shrink(self) -> None:
        """Gives the pages of what was deleted back to the disk, and those of the journal."""
        give_back_pages(self._db)

    def give_up(self, num_bytes: int, *, saved_step: int | None = None) -> int:
        """Deletes the oldest RELEASED groups, `num_bytes` of envelopes where there are so many, and gives their pages
        back to the disk; returns how many went. `saved_step` as in `prune`."""
        num_removed = self.prune(max_disk_bytes=max(0, kept_bytes(self._db) - num_bytes), saved_step=saved_step)
        self.shrink()
        return num_removed

    def _oldest_released(self, saved_step: int | None) -> sqlite3.Cursor:
        """In the order of arrival, without an index: by one, all of them would be sorted before the first is seen."""
        return self._db.execute(
            "SELECT arrival, own, sender, number, reason, num_tokens, length(envelope) AS size FROM groups NOT INDEXED"
            " WHERE state = ? AND (? IS NULL OR step IS NULL OR step <= ?) ORDER BY arrival",
            (State.RELEASED, saved_step, saved_step),
        )

    def last_number(self) -> int:
        """Return the sequence number of this node's newest group; 0 before the first."""
        row = self._db.execute("SELECT value FROM totals WHERE name = 'last_number'").fetchone()
        return int(row["value"]) if row else 0

    def raise_last_number(self, number: int) -> None:
        """Raise the sequence number to at least `number`; the next own group's comes after it."""
        with self._transaction():
            self._add("last_number", max(0, number - self.last_number()))

    def _forget(self, row: sqlite3.Row) -> None:
        """Deletes one row, keeping its number, and itself in the totals that the status shows."""
        origin = "own" if row["own"] else "foreign"
        self._add(f"forgotten_groups_{origin}", 1)
        self._add(f"forgotten_tokens_{origin}", row["num_tokens"])
        if row["reason"] == ReleaseReason.TRAINED:
            self._add(f"forgotten_trained_{origin}", 1)
            self._add(f"forgotten_trained_tokens_{origin}", row["num_tokens"])
        self._db.execute("DELETE FROM groups WHERE arrival = ?", (row["arrival"],))
        forget(self._db, row["sender"], row["number"], touch=row["arrival"])

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
            "SELECT id, sender, own, arrival, created_at, policy_version, task, prompt_index, rewards, weights_of,"
            " length(envelope) AS num_bytes FROM groups WHERE state = ?",
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
                weights_of=row["weights_of"],
                num_bytes=row["num_bytes"],
            )
            for row in rows
        ]

    def _load(self, group_id: bytes) -> StoredGroup:
        row = self._db.execute("SELECT * FROM groups WHERE id = ?", (group_id,)).fetchone()
        if not is_sound(row):
            raise FtisError(f"group {group_id.hex()[:12]} is not what was stored: start again, and it is left out")
        return StoredGroup(
            id=group_id,
            own=bool(row["own"]),
            sender=row["sender"],
            number=row["number"],
            prompt_ref=PromptRef(row["task"], "train", row["prompt_index"]),
            weights_of=row["weights_of"],
            rewards=tuple(json.loads(row["rewards"])),
            prompt_ids=row["prompt_ids"],
            body=open_envelope(row["envelope"]).body,
            text_token_ids=tuple(map(tuple, json.loads(row["text_token_ids"] or "[]"))),
        )

    def _add(self, name: str, amount: int) -> None:
        self._db.execute(
            "INSERT INTO totals (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + ?",
            (name, amount, amount),
        )

    def _transaction(self) -> Transaction:
        return Transaction(self._db)


def _text_token_ids(accepted: Accepted) -> tuple[tuple[int, ...], ...]:
    """Return the ids that this node gave the texts of a group; none for a group that came with tokens."""
    if accepted.retells is None:
        return ()
    return tuple(tuple(ids.tolist()) for ids in accepted.group.tokens.ids_of_each())
