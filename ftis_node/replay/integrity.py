"""Integrity check of an SQLite file, and replacement of a damaged one.

SQLite notices a torn page only when it reads it, perhaps weeks later, in the middle of a step. So SQLite's integrity
check reads the whole file when a node starts. A new file replaces a file that fails the check: an empty buffer, or the
rows of the peers that are readable. The damaged file is moved to `damaged/replay.sqlite-20260102T030405Z/`, with its
write-ahead log. The newest `KEPT_COPIES` copies are kept, and older ones are deleted.

The new file is complete, as `replay.sqlite.new`, before the damaged one is moved. The next start continues an
interrupted replacement.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from ftis_node.config.disk_room import is_disk_full
from ftis_node.errors import DamagedError, FtisError, MachineError
from ftis_node.files import check_database, make_folder, sync_to_disk

BUSY_TIMEOUT_S = 60.0
DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
NO_TEXT = "Could not decode to UTF-8"  # Python raises it, without an SQLite error code
NO_FORMAT = "unsupported file format"  # an unknown format number in the header; SQLite's error code is the general one
MAGIC = b"SQLite format 3\0"
HEADER_BYTES = 100
FORMATS = frozenset({1, 2})  # bytes 18 and 19 of the header; SQLite does not write to a file with other values
MAX_VERSION = 1000  # of a schema: a flipped bit does not count as a newer version
MAX_FILE_BYTES = 1 << 36  # bounds the size that a damaged header states
FOLDER_TIME = "%Y%m%dT%H%M%SZ"
KEPT_COPIES = 2
LONGEST_HOP = 64  # sound rows that may be skipped after a torn page
MAX_TRIES = 4096


class Rescue(NamedTuple):
    """Result of a replacement: the damage, the number of saved rows, the folder of the old file."""

    name: str
    why: str
    num_rows: int
    folder: Path


def explained(error: sqlite3.Error, path: Path) -> Exception:
    """Return the exception to raise for an SQLite error on `path`: one line with the remedy.

    A full disk returns the error itself, because `config/disk_room.py` reports it.
    """
    if is_disk_full(error, path.parent):
        return error
    if is_damage(error):
        return DamagedError(f"{path} is damaged ({error}): the next start of the node replaces it")
    if is_busy(error):
        return MachineError(f"{path} is held by another program: end that program (sqlite3, a backup) and start again")
    return MachineError(f"{path} cannot be used ({error}): check its disk and start again")


def is_busy(error: sqlite3.Error) -> bool:
    """Return whether another program holds the file."""
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


def rescue(
    path: Path,
    damaged: Path,
    *,
    copy: Callable[[sqlite3.Connection, Path], int],
    look: Callable[[sqlite3.Connection], str] = lambda connection: "",
) -> Rescue | None:
    """Replace the file at `path` if `find_damage` finds some. Return the result, or None if the file is sound.

    `copy` writes the readable rows of a connection into a new file and returns their number. Raises OSError and
    sqlite3.Error for errors of the disk, MachineError if another program holds the file.
    """
    new, why, num_rows = path.with_name(f"{path.name}.new"), "cut off while it was saved", 0
    if path.exists() or not new.exists():
        if not (why := find_damage(path, look=look)):
            return None
        num_rows = _save(path, new, copy)
    folder = damaged / f"{path.name}-{time.strftime(FOLDER_TIME, time.gmtime())}"
    make_folder(folder)
    for name in (path.name, f"{path.name}-wal"):  # a new file of the same name would apply the log and be damaged too
        if path.with_name(name).exists():
            path.with_name(name).rename(folder / name)
    path.with_name(f"{path.name}-shm").unlink(missing_ok=True)
    sync_to_disk(folder)
    new.replace(path)
    sync_to_disk(path.parent)
    for outdated in sorted(damaged.glob(f"{path.name}-*"))[:-KEPT_COPIES]:
        shutil.rmtree(outdated)
    return Rescue(path.name, why, num_rows, folder)


def readable_rows(connection: sqlite3.Connection, table: str) -> Iterator[sqlite3.Row]:
    """Yield the readable rows of `table`, each once.

    A damaged page may lead back to earlier rows. A row that appears twice counts as damage and is skipped.
    """
    place, hop, seen = 0, 1, set[int]()
    for _ in range(MAX_TRIES):
        try:
            query = f"SELECT rowid AS place, * FROM {table} NOT INDEXED WHERE rowid > ? ORDER BY rowid"
            for row in connection.execute(query, (place,)):
                if row["place"] in seen:
                    break
                place, hop = row["place"], 1
                seen.add(place)
                yield row
            else:
                return
        except (sqlite3.DatabaseError, OverflowError, UnicodeDecodeError):
            pass
        place, hop = place + hop, min(LONGEST_HOP, 2 * hop)


def _save(path: Path, new: Path, copy: Callable[[sqlite3.Connection, Path], int]) -> int:
    partial = path.with_name(f"{path.name}.partial")
    for left in path.parent.glob(f"{partial.name}*"):
        left.unlink()
    _fill_up(path)
    with closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)) as connection:
        connection.row_factory = sqlite3.Row
        num_rows = copy(connection, partial)
    sync_to_disk(partial)
    partial.replace(new)
    sync_to_disk(path.parent)
    return num_rows


def _fill_up(path: Path) -> None:
    """Pad the file with zeros to the size in its header. SQLite reads no row of a file that is shorter."""
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    if header.startswith(MAGIC):
        page_bytes = int.from_bytes(header[16:18], "big")
        whole_bytes = (65536 if page_bytes == 1 else page_bytes) * int.from_bytes(header[28:32], "big")
        if path.stat().st_size < whole_bytes <= MAX_FILE_BYTES:
            os.truncate(path, whole_bytes)
