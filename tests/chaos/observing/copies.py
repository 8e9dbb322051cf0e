"""Copies of nodes' homes for a later look: bounded in size, without secrets, and with a list of what was left out.

Databases are copied by SQLite, so that the copy of one that a node writes to is whole; one that SQLite cannot copy is
copied as it lies. Of long texts the end is copied.
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
MOST_BYTES = 256 * MIB  # all copies together
MOST_OF_ONE = 32 * MIB
MOST_OF_WEIGHTS = MIB
MOST_OF_A_TEXT = 8 * MIB
TEXTS = frozenset({".jsonl", ".log", ".txt", ".1", ".2", ".3"})
WEIGHTS = frozenset({".safetensors", ".part", ".bin", ".pt"})
SECRETS = frozenset({"identity.key", "control.token", "observe.token"})
BESIDE_A_DATABASE = ("-wal", "-shm")
BUSY_S = 20.0


@dataclass
class Copier:
    """Copies into one folder until so many bytes are spent. `left_out` says in words what was not copied, and why."""

    bytes_left: int = MOST_BYTES
    left_out: list[str] = field(default_factory=list)
    _whole: set[Path] = field(default_factory=set)  # databases that SQLite has copied, with their logs

    def copy(self, source: Path, to: Path) -> None:
        """A file, or a folder with all below it: databases first, then small files, so that the budget goes to many."""
        files = [source] if source.is_file() else sorted(_files_below(source), key=_first_databases)
        for file in files:
            target = to / file.relative_to(source) if source.is_dir() else to
            if file.name.endswith(BESIDE_A_DATABASE) and target.with_name(file.name[:-4]) in self._whole:
                continue  # what they have is in the copy
            if why := self._why_not(file) or self._copied(file, target):
                self.left_out.append(f"{file.relative_to(source.parent)}: {why}")

    def _why_not(self, file: Path) -> str:
        size = _size(file)
        if file.name in SECRETS:
            return "a secret"
        if file.suffix in WEIGHTS and size > MOST_OF_WEIGHTS:
            return f"weights, {size / MIB:.1f} MiB"
        if file.suffix not in TEXTS and size > MOST_OF_ONE:
            return f"{size / MIB:.1f} MiB, more than {MOST_OF_ONE // MIB}"
        if min(size, MOST_OF_A_TEXT if file.suffix in TEXTS else size) > self.bytes_left:
            return f"{size / MIB:.1f} MiB, and the copies have {MOST_BYTES // MIB} MiB together"
        return ""

    def _copied(self, file: Path, target: Path) -> str:
        """Copies; what kept it from that, or from copying all, "" where nothing."""
        target.parent.mkdir(parents=True, exist_ok=True)
        told = ""
        try:
            if file.suffix == ".sqlite" and _copied_by_sqlite(file, target):
                self._whole.add(target)
            elif file.suffix in TEXTS and _size(file) > MOST_OF_A_TEXT:
                told = _end_copied(file, target)
            else:
                shutil.copyfile(file, target)
            self.bytes_left -= _size(target)
        except FileNotFoundError:
            told = "gone before it was copied"
        except OSError as error:
            told = str(error)
        return told


def _files_below(folder: Path) -> Iterator[Path]:
    """Plain files only: no link is followed, no socket opened. What goes meanwhile is passed over."""
    for path in sorted(folder.rglob("*")):
        try:
            if stat.S_ISREG(path.lstat().st_mode):
                yield path
        except FileNotFoundError:
            continue


def _first_databases(file: Path) -> tuple[bool, int]:
    return file.suffix != ".sqlite", _size(file)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _copied_by_sqlite(file: Path, target: Path) -> bool:
    """With what its write-ahead log has. False where it is damaged; the copy as it lies says more then."""
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


def _end_copied(file: Path, target: Path) -> str:
    with file.open("rb") as source:
        source.seek(-MOST_OF_A_TEXT, 2)
        target.write_bytes(source.read())
    return f"all but the last {MOST_OF_A_TEXT // MIB} MiB of {_size(file) / MIB:.1f}"
