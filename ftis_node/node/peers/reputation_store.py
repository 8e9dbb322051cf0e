"""`peers.sqlite` in the home: stores the reputation of peers, so that bans and trust survive a restart or a kill.

`peers` has one row per peer of the bounded reputation table; `used` and `signers` have the rows of the `ReceiptBook`.
WAL mode with full synchronization lets a reported ban survive a power cut. A commit follows each change of a trust
level, and otherwise every ten seconds.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections import Counter
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path

import msgspec

from ftis_node.files import check_database, is_disk_full
from ftis_node.replay.database import check_version, closed_on_error, transaction
from ftis_node.replay.integrity import BUSY_TIMEOUT_S, is_busy
from ftis_node.swarm.receipts import MAX_SENDERS, ReceiptBook, Signer, Used
from ftis_node.swarm.reputation import PeerReputation, Reputation, ReputationTable

SCHEMA_VERSION = 1
SAVE_BUSY_TIMEOUT_MS = 200  # short, since the event loop waits; the next save follows soon
JOURNAL_PAGES = 64  # of 4 KiB: few rows change per commit, and SQLite's default of 1000 pages is larger than the file
SCHEMA = """
CREATE TABLE IF NOT EXISTS peers (
    peer_id      TEXT PRIMARY KEY,
    score        REAL NOT NULL,
    updated_at   REAL NOT NULL,
    banned_until REAL NOT NULL,
    ban_reason   TEXT NOT NULL,
    num_bans     INTEGER NOT NULL,
    trusted      INTEGER NOT NULL,
    reasons      TEXT NOT NULL,
    noted_at     REAL NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS used (
    peer_id TEXT PRIMARY KEY,
    groups  INTEGER NOT NULL,
    tokens  INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS signers (
    peer_id TEXT PRIMARY KEY,
    days    TEXT NOT NULL
) STRICT;
"""
FORGET_OLD_USED = (  # a row that is written again gets a new rowid
    "DELETE FROM used WHERE rowid NOT IN (SELECT rowid FROM used ORDER BY rowid DESC LIMIT ?)"
)
MAKE = f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"

log = logging.getLogger(__name__)


class ReputationStore:
    """Repository of reputations. Raises DamagedError, ConfigError (other schema), MachineError (locked file)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_held = False  # whether another program locked the file at the last save
        check_database(path)
        self._db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        with closed_on_error(self._db, path):
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute(f"PRAGMA wal_autocheckpoint = {JOURNAL_PAGES}")
            check_version(self._db, path, reads=SCHEMA_VERSION)
            self._db.executescript(MAKE)
        self._db.execute(f"PRAGMA busy_timeout = {SAVE_BUSY_TIMEOUT_MS}")

    def close(self) -> None:
        self._db.close()

    def load(self, reputations: ReputationTable, *, now: float) -> None:
        """Load all saved peers into `reputations`, as of `now` (Unix seconds)."""
        for peer_id, *fields, trusted, reasons, noted_at in self._db.execute("SELECT * FROM peers"):
            reputation = replace(Reputation(*fields), trusted=bool(trusted)).by_clock(now)
            counts = Counter[str]()
            with suppress(msgspec.MsgspecError):  # damaged: none
                counts.update(msgspec.json.decode(reasons, type=dict[str, int]))
            reputations.put(peer_id, PeerReputation(reputation, counts, noted_at))

    def load_receipts(self, book: ReceiptBook) -> None:
        """Load all saved receipts. A damaged row is left out, and the peer's next record replaces it."""
        for peer_id, groups, tokens in self._db.execute("SELECT * FROM used ORDER BY rowid"):
            book.given[peer_id] = Used(groups, tokens)
        for peer_id, days in self._db.execute("SELECT * FROM signers ORDER BY rowid"):
            with suppress(msgspec.MsgspecError):
                if found := msgspec.json.decode(days, type=dict[int, Used]):
                    book.signers[peer_id] = Signer(found)

    def save(self, reputations: ReputationTable, book: ReceiptBook) -> None:
        """Write changes since the last call, and delete forgotten peers, in one transaction.

        If another program locks the file, or the disk is full, leave all changes for the next call.
        """
        try:
            with transaction(self._db):
                self._write(reputations, book)
        except sqlite3.OperationalError as error:
            if is_busy(error):
                if not self._is_held:
                    log.warning("%s is held by another program: bans and trust are saved when it is free", self._path)
                self._is_held = True
            elif is_disk_full(error, self._path):
                log.debug("%s is saved when the disk has space: %s", self._path, error)
            else:
                raise
            return
        self._is_held = False
        for pending in (reputations.forgotten, reputations.changed, book.forgotten, book.changed):
            pending.clear()

    def _write(self, reputations: ReputationTable, book: ReceiptBook) -> None:
        changed = ((peer_id, reputations.record_of(peer_id)) for peer_id in sorted(reputations.changed))
        rows = ((one, *astuple(it.reputation), json.dumps(it.reasons), it.noted_at) for one, it in changed)
        self._db.executemany("DELETE FROM peers WHERE peer_id = ?", [(peer_id,) for peer_id in reputations.forgotten])
        self._db.executemany("INSERT OR REPLACE INTO peers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        used = ((peer_id, *book.given[peer_id]) for peer_id in book.changed & book.given.keys())
        signers = (
            (one, msgspec.json.encode(book.signers[one].days).decode()) for one in book.changed & book.signers.keys()
        )
        self._db.executemany("INSERT OR REPLACE INTO used VALUES (?, ?, ?)", used)
        self._db.executemany("INSERT OR REPLACE INTO signers VALUES (?, ?)", signers)
        self._db.execute(FORGET_OLD_USED, (MAX_SENDERS,))
        self._db.executemany("DELETE FROM signers WHERE peer_id = ?", [(signer,) for signer in book.forgotten])
