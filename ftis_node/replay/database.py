"""SQLite file of the buffer: schema, connections, rows.

WAL with full synchronization: a completed commit is on disk. The daemon writes through one connection in one thread.
Readers (`replay list`, validation) open separate read-only connections and never block the writer.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.config.disk_room import free_bytes
from ftis_node.errors import ConfigError, DamagedError
from ftis_node.files import check_database
from ftis_node.replay import side_tables
from ftis_node.replay.integrity import BUSY_TIMEOUT_S, MAX_VERSION, explained

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA_VERSION = 3
INCREMENTAL = 2  # value of `auto_vacuum`: free pages return to the disk on request
MAX_JOURNAL_BYTES = 16 << 20  # each checkpoint truncates the write-ahead log to this size
PAGES_AT_ONCE = 4096  # freed in one transaction, which writes 16 MiB to the write-ahead log
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
    weights_of     TEXT,
    problem        BLOB,
    UNIQUE (sender, number)
) STRICT;
CREATE INDEX IF NOT EXISTS groups_by_time ON groups (created_at);
CREATE INDEX IF NOT EXISTS groups_by_step ON groups (step);
CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
"""
# Columns that older versions ignore, so the schema number does not change.
ADDED_COLUMNS = {
    **{"checksum": "INTEGER", "failed_steps": "INTEGER NOT NULL DEFAULT 0", "num_bytes": "INTEGER"},
    "problem": "BLOB",
}
# The index has all columns that the totals of the status need: SQLite counts 100,000 groups in 15 ms. Earlier versions
# kept counts by triggers.
AFTER_COLUMNS = """
CREATE INDEX IF NOT EXISTS groups_by_outcome ON groups (state, own, reason, num_tokens, num_bytes);
DROP INDEX IF EXISTS groups_by_state;
DROP TRIGGER IF EXISTS counts_admitted; DROP TRIGGER IF EXISTS counts_moved; DROP TRIGGER IF EXISTS counts_pruned;
DROP TABLE IF EXISTS counts;
UPDATE groups SET num_bytes = length(envelope) WHERE num_bytes IS NULL;
"""
# By the version that each one upgrades. `text_token_ids` is JSON, one list per completion, of a group sent as text.
MIGRATIONS = {
    1: "ALTER TABLE groups ADD COLUMN text_token_ids TEXT;",
    2: f"ALTER TABLE groups ADD COLUMN weights_of TEXT; {side_tables.FORGOTTEN_SCHEMA}",
}


def open_writer(path: Path) -> sqlite3.Connection:
    """Open the only connection that writes. Creates a missing file, and upgrades an older schema.

    Raises DamagedError, ConfigError if the schema is newer, MachineError if another program holds the file.
    """
    check_database(path)
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    with _closed_on_error(connection, path):
        connection.execute(f"PRAGMA auto_vacuum = {INCREMENTAL}")  # has an effect only on an empty file
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {MAX_JOURNAL_BYTES}")
        version = _known_version(connection, path)
        for step in range(version, SCHEMA_VERSION) if version else ():
            _upgrade_once(connection, step)
        tables = f"{SCHEMA} {side_tables.FORGOTTEN_SCHEMA}"
        connection.executescript(f"BEGIN; {tables} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        present = {row["name"] for row in connection.execute("SELECT name FROM pragma_table_info('groups')")}
        for name, kind in ADDED_COLUMNS.items():
            if name not in present:
                connection.execute(f"ALTER TABLE groups ADD COLUMN {name} {kind}")
        connection.executescript(f"BEGIN; {AFTER_COLUMNS} COMMIT;")
        side_tables.note_skipped(connection)
    return connection


def give_back_pages(connection: sqlite3.Connection) -> None:
    """Shrink the file to its content. A file without incremental vacuum is rewritten if the disk has space for it."""
    if connection.execute("PRAGMA auto_vacuum").fetchone()[0] != INCREMENTAL:
        _rewrite(connection)
        return
    while num_free := connection.execute("PRAGMA freelist_count").fetchone()[0]:
        connection.execute(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})").fetchall()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        if connection.execute("PRAGMA freelist_count").fetchone()[0] >= num_free:
            break
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _rewrite(connection: sqlite3.Connection) -> None:
    """Rewrite the file, unless the disk lacks twice the size of the content. Then new groups reuse its free pages."""
    (path,) = (row[2] for row in connection.execute("PRAGMA database_list") if row[1] == "main")
    num_pages, num_free, page_bytes = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    if 2 * (num_pages - num_free) * page_bytes < free_bytes(Path(path)):
        connection.execute(f"PRAGMA auto_vacuum = {INCREMENTAL}")
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def open_reader(path: Path) -> sqlite3.Connection:
    """Open a read-only connection, also to a buffer with an older schema.

    Raises ConfigError if the file is missing, and the errors of `open_writer`.
    """
    check_database(path)
    if not path.exists():
        raise ConfigError(f"no replay buffer at {path}: has a node run with this home?")
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S)
    connection.row_factory = sqlite3.Row
    with _closed_on_error(connection, path):
        _known_version(connection, path)
    return connection


@contextmanager
def _closed_on_error(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Close the connection if the block raises; explain an error of SQLite."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        connection.close()
        raise explained(error, path) from None
    except ConfigError:
        connection.close()
        raise


def version_of(path: Path) -> int:
    """Return the schema version of the buffer at `path`. Raises DamagedError, or ConfigError if it is newer."""
    with closing(open_reader(path)) as connection:
        return _known_version(connection, path)


def upgrade_once(path: Path, step: int) -> None:
    """Upgrade the buffer from schema `step` to the next in one transaction. Does nothing if it has another schema."""
    with closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = FULL")
        if _known_version(connection, path) == step:
            _upgrade_once(connection, step)


def back_up(path: Path, to: Path) -> None:
    """Copy the buffer, including its write-ahead log, to the new file `to`."""
    with closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)) as source, closing(sqlite3.connect(to)) as target:
        source.backup(target)


def _known_version(connection: sqlite3.Connection, path: Path) -> int:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if not 0 <= version <= MAX_VERSION:
        raise DamagedError(f"{path} is damaged (schema {version}): the next start of the node replaces it")
    if version not in (0, *MIGRATIONS, SCHEMA_VERSION):
        raise ConfigError(f"{path} has schema {version}; this version of ftis-node knows {SCHEMA_VERSION}: update it")
    return version


def _upgrade_once(connection: sqlite3.Connection, step: int) -> None:
    connection.executescript(f"BEGIN; {MIGRATIONS[step]} PRAGMA user_version = {step + 1}; COMMIT;")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """BEGIN IMMEDIATE, then COMMIT, or ROLLBACK if the block or the commit raises.

    On a full disk SQLite may have rolled back by itself.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
