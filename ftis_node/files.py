"""Reading of untrusted files, such as a home from an archive or a model from the hub; durable writes; full disks.

One reader for all small files gives each the same bounds: regular file, size, UTF-8, depth of nesting. A pipe or device
would block or never end. TOML is bounded before it is parsed. Each error is one line with the file's name.

`replace_file` and `make_folder` survive a full disk and a power cut. They return when their change is on the disk. They
sync a file's content and the folder of its name. For a new folder they sync the one above.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ftis_node.errors import DiskFullError, FileError, MachineError

MAX_SMALL_BYTES = 16 << 20
MAX_DEPTH = 64
MAX_TOML_BYTES = 64 << 10  # `tomllib` needs up to 2 s for so many
MAX_DIGITS = 1000  # a longer number cannot be printed in an error
_LONG_KEY = re.compile(
    rf"""(?<![\w"'-])(?:(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}"""
)  # `tomllib` needs a time that is quadratic in the parts of a key
_LONG_NUMBER = re.compile(rf"[\da-fA-F_]{{{MAX_DIGITS}}}")
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # errors of a full disk
LITTLE_BYTES = 1 << 20  # for some writes to a full disk SQLite reports only an I/O error
NO_DEVICE_WAITS = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def check_regular(path: Path, *, follow_links: bool = True) -> None:
    """Raise FileError unless the path is a regular file or missing; without `follow_links` also for a link."""
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            if not follow_links:
                raise FileError(f"{path} is a link, but must be a file: remove the link (its target stays)")
            mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise FileError(f"{path} is a broken link: remove it, or restore the file") from None
        return
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from None
    _check_mode(mode, path)


def read_file(path: Path, *, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
    """Return all bytes of a regular file.

    Raises FileNotFoundError or NotADirectoryError if it is missing, FileError for everything else.
    """
    check_regular(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | NO_DEVICE_WAITS)
        with os.fdopen(descriptor, "rb") as file:
            _check_mode(os.fstat(descriptor).st_mode, path)
            content = file.read(max_bytes + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > max_bytes:
        raise FileError(f"{path} is larger than the limit of {max_bytes} bytes")
    return content


def read_text(path: Path, *, max_bytes: int = MAX_SMALL_BYTES) -> str:
    """Return the text of a UTF-8 file. Raises as `read_file`, FileError also for other encodings."""
    try:
        return read_file(path, max_bytes=max_bytes).decode()
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8 text (byte {error.start})") from None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises as `read_file`, FileError also for any other content."""
    value = parse_json(read_file(path), source=str(path))
    if not isinstance(value, dict):
        raise FileError(f"{path} is not a JSON object")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises as `read_object`."""
    return parse_toml(read_text(path), source=str(path))


def parse_json(data: bytes | str, *, source: str) -> Any:
    """Return the value of a JSON text; `source` names it in errors. Raises FileError."""
    return _parse(json.loads, data, "JSON", source)


def parse_toml(text: str, *, source: str) -> dict[str, Any]:
    """Return the tables of a TOML text; `source` names it in errors. Raises FileError."""
    import tomllib

    if len(text) > MAX_TOML_BYTES:
        raise FileError(f"{source} is larger than the limit of {MAX_TOML_BYTES} bytes")
    if _LONG_KEY.search(text):
        raise FileError(f"{source} has a key of more than {MAX_DEPTH} parts")
    if _LONG_NUMBER.search(text):
        raise FileError(f"{source} has a number of more than {MAX_DIGITS} digits")
    tables: dict[str, Any] = _parse(tomllib.loads, text, "TOML", source)
    return tables


def _parse(parser: Callable[[Any], Any], text: bytes | str, language: str, source: str) -> Any:
    try:
        value = parser(text)
    except RecursionError:
        raise FileError(f"{source} is nested too deep") from None
    except ValueError as error:
        raise FileError(f"{source} is not {language}: {error}") from None
    _check_depth(value, source=source)
    return value


def _check_depth(value: Any, *, source: str) -> None:
    """Raise FileError for nesting deeper than MAX_DEPTH, because later code may recurse."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _values(outer)]
        if not level:
            return
    raise FileError(f"{source} is nested too deep: more than {MAX_DEPTH} levels")


def check_database(path: Path) -> None:
    """Raise FileError if an SQLite file or a companion of it is a folder, a device or a dangling link."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        check_regular(path.with_name(path.name + suffix))


def open_to_write(path: Path, flags: int, mode: int = 0o666) -> int:
    """Return a descriptor to write or read, not through a link. Raises FileError for a link or folder, else OSError."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | NO_DEVICE_WAITS, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            check_regular(path, follow_links=False)
        raise
    try:
        _check_mode(os.fstat(descriptor).st_mode, path)
    except FileError:
        os.close(descriptor)
        raise
    return descriptor


def hub_cache_problem(error: Exception) -> str:
    """Return in one line that this user may not use the hub's cache; empty for another error of its libraries."""
    if not isinstance(error, OSError) or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ""
    return (
        f"this user may not use the hub's cache at {error.filename} ({error.strerror}): "
        "set HF_HOME to another folder, or complete the cache as its owner"
    )


def sync_to_disk(path: Path) -> None:
    """Write a file's content, or a folder's names, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and the missing ones above it. Raises OSError."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(made):
        sync_to_disk(folder.parent)


def replace_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write `data` to `path` whole or not at all: after an error or a crash `path` has its old content.

    Raises OSError. Raises FileError if `path` is a folder, or if the temporary file's name is a link.
    """
    if path.is_dir() and not path.is_symlink():
        raise FileError(f"{path} is a folder, but must be a file: move it away")
    temporary = path.with_name(f"{path.name}.tmp")
    check_regular(temporary, follow_links=False)
    temporary.unlink(missing_ok=True)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)  # no other user's file
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_to_disk(path.parent)


def _values(outer: dict[str, Any] | list[Any]) -> list[Any]:
    return list(outer.values()) if isinstance(outer, dict) else outer


def _check_mode(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise FileError(f"{path} is a folder, but must be a file: move it away")
    if not stat.S_ISREG(mode):
        raise FileError(f"{path} is a pipe, socket or device, not a regular file: move it away")


def is_disk_full(error: BaseException, root: Path) -> bool:
    """Return whether the disk is full: by the error's code, or for SQLite's I/O errors by the free space at `root`."""
    if isinstance(error, DiskFullError):
        return True
    if isinstance(error, OSError):
        return error.errno in NO_ROOM
    import sqlite3  # every command reads this file, and most touch no database

    if not isinstance(error, sqlite3.OperationalError):
        return False
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and free_bytes(root) < LITTLE_BYTES)


def disk_full(root: Path) -> DiskFullError:
    return DiskFullError(
        f"the disk is full: {free_bytes(root) / 1e6:.1f} MB are free at {root}; free disk space and start "
        "again; the node resumes"
    )


def write_error(message: str, error: OSError) -> MachineError:
    """Return the error of a disk that refuses a write, with its own class if the disk is full."""
    return (DiskFullError if error.errno in NO_ROOM else MachineError)(message)


@contextmanager
def reporting_full_disk(root: Path) -> Iterator[None]:
    """Turn an error of a full disk into a MachineError of one line."""
    try:
        yield
    except Exception as error:
        if is_disk_full(error, root) and not isinstance(error, DiskFullError):
            raise disk_full(root) from error
        raise


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that holds `path`, or will hold it."""
    folder = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(folder).free
