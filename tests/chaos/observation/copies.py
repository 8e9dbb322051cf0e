"""Copies of homes for a later analysis: bounded in size, without secrets, with a list of the files left out.

SQLite copies the databases, so that the copy is consistent while the node writes. A database that SQLite cannot read is
copied as a file. Of a long text only the end is copied.
"""

from __future__ import annotations

import shutil
import sqlite3
import stat
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20
MAX_BYTES = 256 * MIB  # all copies together
MAX_FILE_BYTES = 32 * MIB
MAX_WEIGHTS_BYTES = MIB
MAX_TEXT_BYTES = 8 * MIB
TEXTS = frozenset({".jsonl", ".log", ".txt", ".1", ".2", ".3"})
WEIGHTS = frozenset({".safetensors", ".part", ".bin", ".pt"})
SECRETS = frozenset({"identity.key", "control.token", "observe.token"})
BESIDE_A_DATABASE = ("-wal", "-shm")
BUSY_S = 20.0


@dataclass
class Copier:
    """Copies files up to `bytes_left`. `left_out` lists the files that were not copied, with the reason."""

    bytes_left: int = MAX_BYTES
    left_out: list[str] = field(default_factory=list)
    _complete: set[Path] = field(default_factory=set)  # databases that SQLite copied with their write-ahead logs

    def copy(self, source: Path, to: Path) -> None:
        """Copy a file or a folder: databases first, then small files, so that the limit allows many files."""
        files = [source] if source.is_file() else sorted(_files_below(source), key=_databases_first)
        for file in files:
            target = to / file.relative_to(source) if source.is_dir() else to
            if file.name.endswith(BESIDE_A_DATABASE) and target.with_name(file.name[:-4]) in self._complete:
                continue  # the copy contains their content
            if reason := self._refusal(file) or self._copy(file, target):
                self.left_out.append(f"{file.relative_to(source.parent)}: {reason}")

    def _refusal(self, file: Path) -> str:
        """Return why the file must not be copied, or ""."""
        size = _size(file)
        if file.name in SECRETS:
            return "a secret"
        if file.suffix in WEIGHTS and size > MAX_WEIGHTS_BYTES:
            return f"weights, {size / MIB:.1f} MiB"
        if file.suffix not in TEXTS and size > MAX_FILE_BYTES:
            return f"{size / MIB:.1f} MiB, more than {MAX_FILE_BYTES // MIB}"
        if min(size, MAX_TEXT_BYTES if file.suffix in TEXTS else size) > self.bytes_left:
            return f"{size / MIB:.1f} MiB, above the limit of {MAX_BYTES // MIB} MiB for all copies"
        return ""

    def _copy(self, file: Path, target: Path) -> str:
        """Copy the file; return what was not copied and why, or ""."""
        target.parent.mkdir(parents=True, exist_ok=True)
        problem = ""
        try:
            if file.suffix == ".sqlite" and _copy_by_sqlite(file, target):
                self._complete.add(target)
            elif file.suffix in TEXTS and _size(file) > MAX_TEXT_BYTES:
                problem = _copy_end(file, target)
            else:
                shutil.copyfile(file, target)
            self.bytes_left -= _size(target)
        except FileNotFoundError:
            problem = "removed before the copy"
        except OSError as error:
            problem = str(error)
        return problem


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield regular files, and no links or sockets. Files that disappear meanwhile are skipped."""
    for path in sorted(folder.rglob("*")):
        try:
            if stat.S_ISREG(path.lstat().st_mode):
                yield path
        except FileNotFoundError:
            continue


def _databases_first(file: Path) -> tuple[bool, int]:
    return file.suffix != ".sqlite", _size(file)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _copy_by_sqlite(file: Path, target: Path) -> bool:
    """Copy a database with the content of its write-ahead log; return False if it is damaged."""
    try:
        with (
            closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)) as source,
            closing(sqlite3.connect(target)) as copy,
        ):
            source.backup(copy)
    except sqlite3.Error:
        target.unlink(missing_ok=True)
        return False
    return True


def _copy_end(file: Path, target: Path) -> str:
    with file.open("rb") as source:
        source.seek(-MAX_TEXT_BYTES, 2)
        target.write_bytes(source.read())
    return f"all but the last {MAX_TEXT_BYTES // MIB} MiB of {_size(file) / MIB:.1f}"
