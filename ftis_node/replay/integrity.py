"""Integrity check of an SQLite file; a damaged one is set aside.

SQLite notices a torn page only when it reads it, perhaps weeks later, in the middle of a step. So SQLite's integrity
check reads the whole file when a node starts. A file that fails is moved to `damaged/replay.sqlite-20260102T030405Z/`,
with its write-ahead log, and the node continues as if it were missing. The newest `KEPT_COPIES` copies are kept.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ftis_node.errors import DamagedError, FtisError, MachineError
from ftis_node.files import check_database, is_disk_full, make_folder, sync_to_disk

BUSY_TIMEOUT_S = 60.0
DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
NO_TEXT = "Could not decode to UTF-8"  # Python raises it, without an SQLite error code
NO_FORMAT = "unsupported file format"  # an unknown format number in the header; SQLite's error code is the general one
HEADER_BYTES = 100
FORMATS = frozenset({1, 2})  # bytes 18 and 19 of the header; SQLite does not write to a file with other values
MAX_VERSION = 1000  # of a schema: a flipped bit does not count as a newer version
FOLDER_TIME = "%Y%m%dT%H%M%SZ"
KEPT_COPIES = 2


class SetAside(NamedTuple):
    why: str
    folder: Path


def explained(error: sqlite3.Error, path: Path) -> Exception:
    """Return the exception to raise for an SQLite error on `path`: one line with the remedy.

    A full disk returns the error itself, because `files.reporting_full_disk` reports it.
    """
    if is_disk_full(error, path.parent):
        return error
    if is_damage(error):
        return DamagedError(f"{path} is damaged ({error}): the next start of the node replaces it")
    if is_busy(error):
        return MachineError(f"{path} is held by another program: end that program (sqlite3, a backup) and start again")
    return MachineError(f"{path} cannot be used ({error}): check its disk and start again")


def is_busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in BUSY


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether the error means corruption: of pages, of the header, or of a text that is not UTF-8."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in DAMAGE or NO_FORMAT in str(error) or NO_TEXT in str(error)


@contextmanager
def reporting_damage(root: Path) -> Iterator[None]:
    """Convert SQLite's errors for a damaged or locked database in `root` into one line with the remedy.

    A running node that finds damage ends with an internal error. The next start replaces the file.
    """
    try:
        yield
    except sqlite3.DatabaseError as error:
        if is_damage(error) or is_busy(error):
            raise FtisError(f"a database in {explained(error, root)}") from error
        raise


def find_damage(path: Path, *, look: Callable[[sqlite3.Connection], str] = lambda connection: "") -> str:
    """Return the first damage in the file; "" if the file is sound, empty or missing.

    `look` returns further damage that SQLite's integrity check does not find, or "". Raises MachineError if another
    program holds the file.
    """
    check_database(path)
    if not path.exists() or not path.stat().st_size:
        return ""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)
    try:
        found = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
        _read_texts(connection)
        wrong = _wrong_header(connection, path) or look(connection)
    except UnicodeDecodeError as error:  # SQLite's error message itself is not valid UTF-8
        return f"{NO_TEXT}: {error}"
    except sqlite3.DatabaseError as error:
        problem = explained(error, path)
        if not isinstance(problem, DamagedError):
            raise problem from None
        return str(error)
    finally:
        connection.close()
    return wrong if found == "ok" else " ".join(found.split())


def _wrong_header(connection: sqlite3.Connection, path: Path) -> str:
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    if not FORMATS.issuperset(header[18:20]):
        return f"formats {header[18]} and {header[19]} in the header"
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    return "" if 0 <= version <= MAX_VERSION else f"schema {version} in the header"


def _read_texts(connection: sqlite3.Connection) -> None:
    """Read all texts. SQLite accepts any bytes as text, but Python would raise an error in the middle of a step."""
    columns = (
        "SELECT tables.name, group_concat('\"' || columns.name || '\"')"
        " FROM sqlite_master AS tables, pragma_table_info(tables.name) AS columns"
        " WHERE tables.type = 'table' AND columns.type = 'TEXT' GROUP BY tables.name"
    )
    connection.execute("SELECT name, tbl_name, sql FROM sqlite_master").fetchall()
    for table, names in connection.execute(columns).fetchall():
        for _ in connection.execute(f'SELECT {names} FROM "{table}"'):
            pass


def set_aside_damaged(
    path: Path, damaged: Path, *, look: Callable[[sqlite3.Connection], str] = lambda connection: ""
) -> SetAside | None:
    """Move the file at `path` below `damaged` if `find_damage` finds some. Return None if the file is sound.

    Raises OSError and sqlite3.Error for errors of the disk, MachineError if another program holds the file.
    """
    logs = [path.with_name(f"{path.name}-{suffix}") for suffix in ("wal", "shm")]
    why = find_damage(path, look=look)
    if why:
        folder = damaged / f"{path.name}-{time.strftime(FOLDER_TIME, time.gmtime())}"
        make_folder(folder)
        for part in (path, logs[0]):  # the file first: without its log it would be an earlier state
            if part.exists():
                part.rename(folder / part.name)
        sync_to_disk(folder)
        sync_to_disk(path.parent)
        for outdated in sorted(damaged.glob(f"{path.name}-*"))[:-KEPT_COPIES]:
            shutil.rmtree(outdated)
    if not path.exists():  # also after a start that ended between the two
        for log in logs:
            log.unlink(missing_ok=True)
    return SetAside(why, folder) if why else None
