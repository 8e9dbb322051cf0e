"""SQLite file of the buffer: schema, connections, rows.

WAL with full synchronization: a completed commit is on disk. The daemon writes through one connection in one thread.
Readers (`replay list`, validation) open separate read-only connections and never block the writer.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ftis_node.errors import ConfigError, DamagedError
from ftis_node.files import check_database
from ftis_node.replay.integrity import BUSY_TIMEOUT_S, MAX_VERSION, explained

SCHEMA_VERSION = 1
INCREMENTAL = 2  # value of `auto_vacuum`: free pages return to the disk on request
MAX_JOURNAL_BYTES = 16 << 20  # each checkpoint truncates the write-ahead log to this size
MAX_FORGOTTEN = 65_536  # about 10 MB on disk
LAST_NUMBER, PROMPT_POSITION, RESET_AT = "last_number", "prompt_position", "reset_at"  # in `totals`
KEPT_GROUPS, KEPT_BYTES = "kept_groups", "kept_bytes"  # there, too: of all rows, which are too many to count often
PAGES_AT_ONCE = 4096  # freed in one transaction, which writes 16 MiB to the write-ahead log
# `text_token_ids` is JSON, one list per completion, of a group sent as text. `groups_by_outcome` has all columns that
# the totals of the status need: SQLite counts 100,000 groups in 15 ms.
# By `forgotten`, the node refuses an old envelope whose group it no longer stores. The table keeps the most recently
# pruned groups. An older group is still refused because of its age.
FORGOTTEN_SCHEMA = """
CREATE TABLE IF NOT EXISTS forgotten (
    sender  TEXT NOT NULL,
    number  INTEGER NOT NULL,
    touched INTEGER NOT NULL,
    PRIMARY KEY (sender, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS forgotten_by_touch ON forgotten (touched);
"""
SCHEMA = f"""
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
    rewards        BLOB NOT NULL,
    prompt_ids     BLOB NOT NULL,
    envelope       BLOB NOT NULL,
    text_token_ids TEXT,
    observation_ids TEXT,
    weights_of     TEXT,
    problem        BLOB NOT NULL,
    checksum       INTEGER NOT NULL,
    failed_steps   INTEGER NOT NULL DEFAULT 0,
    num_bytes      INTEGER NOT NULL,
    UNIQUE (sender, number)
) STRICT;
CREATE INDEX IF NOT EXISTS groups_by_time ON groups (created_at);
CREATE INDEX IF NOT EXISTS groups_by_step ON groups (step);
CREATE INDEX IF NOT EXISTS groups_by_outcome ON groups (state, own, reason, num_tokens, num_bytes);
CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
{FORGOTTEN_SCHEMA}
"""


def open_writer(path: Path) -> sqlite3.Connection:
    """Open the only connection that writes. Creates a missing file.

    Raises DamagedError, ConfigError for another schema, MachineError if another program holds the file.
    """
    check_database(path)
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    with closed_on_error(connection, path):
        connection.execute(f"PRAGMA auto_vacuum = {INCREMENTAL}")  # has an effect only on an empty file
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {MAX_JOURNAL_BYTES}")
        check_version(connection, path)
        connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    return connection


def give_back_pages(connection: sqlite3.Connection) -> None:
    while num_free := connection.execute("PRAGMA freelist_count").fetchone()[0]:
        connection.execute(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})").fetchall()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        if connection.execute("PRAGMA freelist_count").fetchone()[0] >= num_free:
            break
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def open_reader(path: Path) -> sqlite3.Connection:
    """Open a read-only connection. Raises ConfigError if the file is missing, and the errors of `open_writer`."""
    check_database(path)
    if not path.exists():
        raise ConfigError(f"no replay buffer at {path}: has a node run with this home?")
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S)
    connection.row_factory = sqlite3.Row
    with closed_on_error(connection, path):
        check_version(connection, path)
    return connection


@contextmanager
def closed_on_error(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Close the connection if the block raises, and explain the error."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        connection.close()
        raise explained(error, path) from None
    except ConfigError:
        connection.close()
        raise


def check_schema(path: Path) -> None:
    """Raise DamagedError for a damaged buffer, ConfigError for one of another version of ftis-node."""
    open_reader(path).close()


def check_version(connection: sqlite3.Connection, path: Path, *, reads: int = SCHEMA_VERSION) -> None:
    """Raise DamagedError for an impossible schema number, ConfigError for another than `reads`. A new file has 0."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if not 0 <= version <= MAX_VERSION:
        raise DamagedError(f"{path} is damaged (schema {version}): the next start of the node replaces it")
    if version not in (0, reads):
        raise ConfigError(
            f"{path} was written by another version of ftis-node (schema {version}, this one reads {reads}): "
            "use that version, or give another --home"
        )


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


def is_forgotten(db: sqlite3.Connection, sender: str, number: int) -> bool:
    """Return whether a pruned group of the sender had this number."""
    query = "SELECT 1 FROM forgotten WHERE sender = ? AND number = ?"
    return db.execute(query, (sender, number)).fetchone() is not None


def forget(db: sqlite3.Connection, sender: str, number: int, *, touch: int) -> None:
    """Record that the sender's group with this number is pruned; `touch` orders the calls. Use a transaction."""
    db.execute("INSERT OR IGNORE INTO forgotten VALUES (?, ?, ?)", (sender, number, touch))


def trim(db: sqlite3.Connection) -> None:
    """Delete the rows beyond `MAX_FORGOTTEN`, the least recently touched first. Use a transaction."""
    excess = db.execute("SELECT count(*) FROM forgotten").fetchone()[0] - MAX_FORGOTTEN
    if excess > 0:
        oldest = "SELECT sender, number FROM forgotten ORDER BY touched LIMIT ?"
        db.execute(f"DELETE FROM forgotten WHERE (sender, number) IN ({oldest})", (excess,))


def count_kept(db: sqlite3.Connection) -> None:
    """Set the totals of the kept rows, because another version or tool may have written the file."""
    for name, count in ((KEPT_GROUPS, "count(*)"), (KEPT_BYTES, "coalesce(sum(num_bytes), 0)")):
        db.execute(
            f"INSERT INTO totals SELECT ?, {count} FROM groups WHERE true"
            " ON CONFLICT (name) DO UPDATE SET value = excluded.value WHERE value != excluded.value",
            (name,),
        )


def read_total(db: sqlite3.Connection, name: str) -> int:
    row = db.execute("SELECT value FROM totals WHERE name = ?", (name,)).fetchone()
    return int(row[0]) if row else 0
