"""Durable replay buffer: admission, choice of a step's groups, release. Each public method is one transaction.

Every method waits for the disk, so the daemon calls them in one dedicated thread. `lifecycle.py` draws the states.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from ftis_node.config.limits import MAX_KEPT_GROUPS
from ftis_node.errors import FtisError
from ftis_node.records.envelope import Accepted
from ftis_node.replay import database
from ftis_node.replay.database import transaction
from ftis_node.replay.group_choice import Candidate, ChoiceRule, Freshness, choose_evicted, choose_newest
from ftis_node.replay.lifecycle import ReleaseReason, State
from ftis_node.replay.reset import limit_reset_at
from ftis_node.replay.stored_rows import CANDIDATE_COLUMNS, StoredGroup, candidate_of, new_row, sound_envelope
from ftis_node.swarm.rate_limits import ShareCap

MAX_FAILED_STEPS = 3


class Taken(NamedTuple):
    """Groups of a step, and the groups that the choice released without using them."""

    groups: list[StoredGroup]
    discarded: list[Candidate]


class ReplayBuffer:
    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises DamagedError, MachineError if locked, ConfigError for a newer schema."""
        self._db = database.open_writer(path)
        limit_reset_at(self._db)
        database.count_kept(self._db)

    def close(self) -> None:
        self._db.close()

    def admit(self, accepted: Accepted, *, own: bool) -> bool:
        """Admit one group: WAITING -> READY, on disk at return. Return False as `admit_many` does."""
        return self.admit_many([(accepted, own)])[0]

    def admit_many(self, arrivals: Sequence[tuple[Accepted, bool]]) -> list[bool]:
        """Admit groups, own or not, with one wait for the disk. False if the number is known or a reset came later."""
        with transaction(self._db):
            return [self._insert(accepted, own=own) for accepted, own in arrivals]

    def _insert(self, accepted: Accepted, *, own: bool) -> bool:
        group = accepted.group
        is_before_reset = not own and group.created_at <= database.read_total(self._db, database.RESET_AT)
        if is_before_reset or database.is_forgotten(self._db, group.sender, group.number):
            return False
        row = new_row(accepted, own=own)
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        query = f"INSERT INTO groups ({names}) VALUES ({marks}) ON CONFLICT DO NOTHING"
        done = self._db.execute(query, tuple(row.values()))
        if done.rowcount:
            self._add_kept(1, len(accepted.envelope_bytes))
        if own and done.rowcount:
            self.raise_last_number(group.number)
            self._add(database.PROMPT_POSITION, 1)
        return bool(done.rowcount)

    def take(self, step: int, *, own: int, foreign: int, rule: ChoiceRule = choose_newest) -> Taken:
        """Take up to `own` own and `foreign` foreign groups, chosen by `rule`, for a step: READY -> TAKEN.

        Groups that the rule discards change from READY to RELEASED(discarded). With 0 own groups it sees the foreign
        ones alone, because the own ones are there for peers.
        """
        with transaction(self._db):
            selection = rule([each for each in self._candidates() if own or not each.own], own, foreign)
            self._db.executemany(
                "UPDATE groups SET state = ?, step = ? WHERE id = ?",
                [(State.TAKEN, step, candidate.id) for candidate in selection.taken],
            )
            self._set_released(selection.discarded, ReleaseReason.DISCARDED)
        return Taken([self._load(candidate.id) for candidate in selection.taken], list(selection.discarded))

    def release_step(self, step: int, reason: ReleaseReason) -> int:
        """Release all groups of a step: TAKEN -> RELEASED(`reason`). Return their number."""
        return self._release_where(reason, "state = ? AND step = ?", State.TAKEN, step).rowcount

    def release_stale(self, freshness: Freshness) -> list[Candidate]:
        """Release and return the groups that are too old: READY -> RELEASED(stale)."""
        stale = [candidate for candidate in self._candidates() if freshness.is_stale(candidate)]
        self._release(stale, ReleaseReason.STALE)
        return stale

    def release_delivered(self, ids: Collection[bytes]) -> list[Candidate]:
        """Release and return the own groups with these ids: READY -> RELEASED(delivered)."""
        delivered = [candidate for candidate in self._candidates() if candidate.own and candidate.id in ids]
        self._release(delivered, ReleaseReason.DELIVERED)
        return delivered

    def evict_foreign(
        self, *, keep: int, keep_bytes: int | None = None, cap: ShareCap | None = None
    ) -> list[Candidate]:
        """Evict foreign groups beyond `keep`, `keep_bytes` or `cap`: READY -> RELEASED(evicted). Return them."""
        evicted = choose_evicted(self._candidates(), keep=keep, keep_bytes=keep_bytes, cap=cap or ShareCap())
        self._release(evicted, ReleaseReason.EVICTED)
        return evicted

    def release_ready(self, group_id: bytes, reason: ReleaseReason) -> bool:
        """Release one group: READY -> RELEASED(`reason`). Return False if it is no longer READY."""
        return self._release_where(reason, "id = ? AND state = ?", group_id, State.READY).rowcount == 1

    def reconcile(self, step: int, last_groups: Sequence[bytes] | None = None) -> int:
        """Reconcile the groups with the learner's checkpoint at `step`; return how many are READY again.

        Groups of a step that the checkpoint includes become trained. Groups of a later step become READY again, because
        its work is lost. `last_groups` lists the groups of `step` by the checkpoint. If the buffer disagrees (one of
        the two is from a backup), the checkpoint decides, because it has the weights.
        """
        with transaction(self._db):
            num_restored = 0 if last_groups is None else self._apply_checkpoint(step, last_groups)
            self._release_where(ReleaseReason.TRAINED, "state = ? AND step <= ?", State.TAKEN, step)
            undone = self._db.execute(
                "UPDATE groups SET state = ?, reason = NULL, step = NULL WHERE step > ? AND (state = ? OR reason = ?)",
                (State.READY, step, State.TAKEN, ReleaseReason.TRAINED),
            )
        return undone.rowcount + num_restored

    def _apply_checkpoint(self, step: int, ids: Sequence[bytes]) -> int:
        """Make `ids` the only groups that `step` trained on. Return the number of others, which become READY again.

        If the buffer names an earlier step for one of `ids`, that step stays, because the event log has it too.
        """
        trained = (State.RELEASED, ReleaseReason.TRAINED)
        rows = self._db.execute(
            "SELECT id FROM groups WHERE step = ? AND (state = ? OR reason = ?)",
            (step, State.TAKEN, ReleaseReason.TRAINED),
        )
        untrained = {row["id"] for row in rows} - set(ids)
        self._db.executemany(
            "UPDATE groups SET state = ?, reason = NULL, step = NULL WHERE id = ?",
            [(State.READY, group_id) for group_id in untrained],
        )
        self._db.executemany(
            "UPDATE groups SET state = ?, reason = ?, step = min(coalesce(step, ?), ?)"
            " WHERE id = ? AND (state != ? OR reason IN (?, ?))",
            [(*trained, step, step, group_id, *trained, ReleaseReason.DAMAGED) for group_id in ids],  # damaged later
        )
        return len(untrained)

    def note_failed(self, step: int) -> None:
        """Count a failure of the learner for each group of `step`; they stay TAKEN until `reconcile`.

        The count is on disk, because a failed request also ends the node. The next start takes the same groups.
        """
        query = "UPDATE groups SET failed_steps = failed_steps + 1 WHERE state = ? AND step = ?"
        self._db.execute(query, (State.TAKEN, step))

    def release_poisoned(self) -> list[bytes]:
        """Release the groups of `MAX_FAILED_STEPS` failed steps: READY -> RELEASED(poisoned). Return their ids.

        Otherwise every later step would take them and fail too.
        """
        failed = "state = ? AND failed_steps >= ? RETURNING id"
        rows = self._release_where(ReleaseReason.POISONED, failed, State.READY, MAX_FAILED_STEPS)
        return [row["id"] for row in rows.fetchall()]

    def release_damaged(self) -> list[bytes]:
        """Release the groups whose rows have changed on disk: READY, TAKEN -> RELEASED(damaged). Return their ids."""
        with transaction(self._db):
            rows = self._db.execute("SELECT * FROM groups WHERE state != ? ORDER BY arrival", (State.RELEASED,))
            damaged = [row["arrival"] for row in rows if sound_envelope(row) is None]
            found = [
                self._release_where(ReleaseReason.DAMAGED, "arrival = ? RETURNING id", arrival).fetchone()["id"]
                for arrival in damaged
            ]
        return [bytes(group_id) for group_id in found]

    def prune(self, *, max_disk_bytes: int, saved_step: int | None = None, max_groups: int = MAX_KEPT_GROUPS) -> int:
        """Delete the oldest RELEASED groups; return their number.

        At most `max_groups` groups and `max_disk_bytes` bytes of envelopes stay.

        Groups of steps after the checkpoint at `saved_step` stay, because a learner that resumes there needs them.
        """
        with transaction(self._db):
            kept, num_kept = self._kept_bytes(), database.read_total(self._db, database.KEPT_GROUPS)
            deleted: list[sqlite3.Row] = []
            is_full = kept > max_disk_bytes or num_kept > max_groups
            for row in self._oldest_released(saved_step) if is_full else ():
                if kept <= max_disk_bytes and num_kept - len(deleted) <= max_groups:
                    break
                deleted.append(row)
                kept -= row["num_bytes"]
            for row in deleted:
                self._forget(row)
            database.trim(self._db)
        return len(deleted)

    def shrink(self) -> None:
        """Return free pages of the file, and the space of the write-ahead log, to the disk."""
        database.give_back_pages(self._db)

    def evict_released(self, num_bytes: int, *, saved_step: int | None = None) -> int:
        """Delete RELEASED groups as `prune` does, up to `num_bytes`, and shrink the file. Return their number."""
        most_bytes = max(0, self._kept_bytes() - num_bytes)
        num_removed = self.prune(max_disk_bytes=most_bytes, saved_step=saved_step)
        self.shrink()
        return num_removed

    def _kept_bytes(self) -> int:
        return database.read_total(self._db, database.KEPT_BYTES)

    def _oldest_released(self, saved_step: int | None) -> sqlite3.Cursor:
        """Return the RELEASED groups by arrival. No index is used, because with one SQLite first sorts all rows."""
        return self._db.execute(
            "SELECT arrival, own, sender, number, reason, num_tokens, num_bytes FROM groups NOT INDEXED"
            " WHERE state = ? AND (? IS NULL OR step IS NULL OR step <= ?) ORDER BY arrival",
            (State.RELEASED, saved_step, saved_step),
        )

    def last_number(self) -> int:
        """Return the highest sequence number of an own group, or the number before the first of a newer epoch."""
        return database.read_total(self._db, database.LAST_NUMBER)

    def prompt_position(self) -> int:
        """Return the position in the prompt order: the number of own groups so far."""
        return database.read_total(self._db, database.PROMPT_POSITION)

    def raise_last_number(self, number: int) -> None:
        self._add(database.LAST_NUMBER, max(0, number - self.last_number()))

    def _forget(self, row: sqlite3.Row) -> None:
        """Delete one row. Its sequence number stays known, and the totals of the status still count it."""
        origin = "own" if row["own"] else "foreign"
        self._add(f"forgotten_groups_{origin}", 1)
        self._add(f"forgotten_tokens_{origin}", row["num_tokens"])
        if row["reason"] == ReleaseReason.TRAINED:
            self._add(f"forgotten_trained_{origin}", 1)
            self._add(f"forgotten_trained_tokens_{origin}", row["num_tokens"])
        self._db.execute("DELETE FROM groups WHERE arrival = ?", (row["arrival"],))
        self._add_kept(-1, -row["num_bytes"])
        database.forget(self._db, row["sender"], row["number"], touch=row["arrival"])

    def _release(self, groups: Sequence[Candidate], reason: ReleaseReason) -> None:
        if groups:
            with transaction(self._db):
                self._set_released(groups, reason)

    def _set_released(self, groups: Sequence[Candidate], reason: ReleaseReason) -> None:
        changes = [(State.RELEASED, reason, group.id) for group in groups]
        self._db.executemany("UPDATE groups SET state = ?, reason = ? WHERE id = ?", changes)

    def _release_where(self, reason: ReleaseReason, condition: str, *arguments: object) -> sqlite3.Cursor:
        query = f"UPDATE groups SET state = ?, reason = ? WHERE {condition}"
        return self._db.execute(query, (State.RELEASED, reason, *arguments))

    def _candidates(self) -> list[Candidate]:
        rows = self._db.execute(f"SELECT {CANDIDATE_COLUMNS} FROM groups WHERE state = ?", (State.READY,))
        return [candidate_of(row) for row in rows]

    def _load(self, group_id: bytes) -> StoredGroup:
        row = self._db.execute("SELECT * FROM groups WHERE id = ?", (group_id,)).fetchone()
        envelope = sound_envelope(row)
        if envelope is None:
            raise FtisError(f"group {group_id.hex()[:12]} changed on disk: start again, and the node omits it")
        return StoredGroup.from_row(row, envelope)

    def _add_kept(self, num_groups: int, num_bytes: int) -> None:
        self._add(database.KEPT_GROUPS, num_groups)
        self._add(database.KEPT_BYTES, num_bytes)

    def _add(self, name: str, amount: int) -> None:
        self._db.execute(
            "INSERT INTO totals (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + ?",
            (name, amount, amount),
        )
