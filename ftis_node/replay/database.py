"""The buffer's SQLite file: schema, connections, rows.

WAL with full synchronisation: what a commit acknowledged is on disk. The daemon writes through one connection in one
thread; readers (`replay list`, the door's look-ups) open their own read-only connection and never block the writer.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from ftis_node.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA_VERSION = 2
BUSY_TIMEOUT_S = 10.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    arrival        INTEGER PRIMARY KEY AUTOINCREMENT,
    id             BLOB NOT NULL UNIQUE,
    own            INTEGER NOT NULL,
    sender         TEXT NOT NULL,
    number         INTEGER NOT NULL,
    state          TEXT NOT NULL,
    reason         TEXT,
    step           INTEGER,
    task           TEXT NOT NULL,
    prompt_index   INTEGER NOT NULL,
    model          TEXT NOT NULL,
    policy_version INTEGER NOT NULL,
    created_at     REAL NOT NULL,
    admitted_at    REAL NOT NULL,
    num_tokens     INTEGER NOT NULL,
    rewards        TEXT NOT NULL,
    prompt_ids     BLOB NOT NULL,
    envelope       BLOB NOT NULL,
    text_token_ids TEXT,
    UNIQUE (sender, number)
) STRICT;
CREATE INDEX IF NOT EXISTS groups_by_state ON groups (state, own);
CREATE INDEX IF NOT EXISTS groups_by_step ON groups (step);
CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
"""
MIGRATIONS = {
    1: "ALTER TABLE groups ADD COLUMN text_token_ids TEXT;",  # of groups told as text: JSON, a list a completion
}


def open_writer(path: Path) -> sqlite3.Connection:
    """The one writing connection; makes a missing file. Raises ConfigError for a damaged or unknown one."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, *MIGRATIONS, SCHEMA_VERSION):
            raise ConfigError(f"{path} has schema {version}; this version of ftis-node knows {SCHEMA_VERSION}")
        upgrade = MIGRATIONS.get(version, "")
        connection.executescript(f"BEGIN; {upgrade} {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    except sqlite3.DatabaseError as error:
        connection.close()
        raise ConfigError(f"{path} is damaged ({error}): move it away to start with an empty buffer") from None
    except ConfigError:
        connection.close()
        raise
    return connection


def open_reader(path: Path) -> sqlite3.Connection:
    """A read-only connection. Raises ConfigError where there is no buffer."""
    if not path.exists():
        raise ConfigError(f"no replay buffer at {path}: has a node run with this home?")
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S)
    connection.row_factory = sqlite3.Row
    return connection
