"""What is left of a folder when the power fails: only what was synced.

While `recorded` runs, each `os.fsync` is noted: of a file its content, of a folder its names. So the folder can be laid
out as it would be found after a power cut at any of these instants, by each of three disks:

    strict      lost every name and every content that was not synced
    eager       wrote all names at once, and no content that was not synced: such a file is there, and empty
    backwards   as strict, but of the names that were not synced the newest of each folder is there

A real disk does something between these. What SQLite syncs is its own, and is not seen here.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Iterator

Tree = dict[Path, bytes | None]  # by path: a file's content; None for a folder
SYNC = os.fsync


@dataclass
class Record:
    """The syncs of one block: how many, of what, and what a cut after each would have left."""

    root: Path
    skipped: frozenset[int] = frozenset()  # the numbers of the syncs that do nothing
    synced: list[str] = field(default_factory=list)
    left: list[dict[str, Tree]] = field(default_factory=list)
    _contents: dict[int, bytes] = field(default_factory=dict)
    _names: dict[int, dict[str, int]] = field(default_factory=dict)
    _is_folder: dict[int, bool] = field(default_factory=dict)
    _pinned: list[int] = field(default_factory=list)  # descriptors: a number of an inode is not used twice meanwhile

    def sync(self, descriptor: int) -> None:
        """Stands in for `os.fsync`: an instant before it and one after."""
        self.note_instant()
        SYNC(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.synced.append(path.name)
        if len(self.synced) - 1 not in self.skipped:
            self._note(path, os.fstat(descriptor))
        self.note_instant()

    def note_instant(self) -> None:
        """What a cut now would leave."""
        root, newest = self.root.stat().st_ino, self._newest_names()
        self.left.append(
            {
                "strict": dict(self._by_syncs(Path(), root, {})),
                "eager": dict(self._eager(self.root)),
                "backwards": dict(self._by_syncs(Path(), root, newest)),
            }
        )

    def close(self) -> None:
        """Lets go of what was pinned."""
        for descriptor in self._pinned:
            os.close(descriptor)

    def _note(self, path: Path, status: os.stat_result) -> None:
        self._pin(path)
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = {name.name: self._pin(name) for name in path.iterdir()}
        else:
            self._contents[status.st_ino] = path.read_bytes()

    def _pin(self, path: Path) -> int:
        self._pinned.append(os.open(path, os.O_RDONLY))
        return os.fstat(self._pinned[-1]).st_ino

    def _newest_names(self) -> dict[int, dict[str, int]]:
        """By folder's inode, the newest name in it that was not synced."""
        newest: dict[int, dict[str, int]] = {}
        for folder in [self.root, *(path for path in self.root.rglob("*") if path.is_dir())]:
            inode = folder.stat().st_ino
            synced = self._names.get(inode, {})
            names = [path for path in folder.iterdir() if synced.get(path.name) != path.stat().st_ino]
            if names:
                name = max(names, key=lambda path: path.stat().st_ctime_ns)
                newest[inode] = {name.name: name.stat().st_ino}
                self._is_folder[name.stat().st_ino] = name.is_dir()
        return newest

    def _by_syncs(
        self, path: Path, inode: int, besides: dict[int, dict[str, int]]
    ) -> Iterator[tuple[Path, bytes | None]]:
        names = self._names.get(inode, {}) | besides.get(inode, {})
        if inode in self._contents:
            yield path, self._contents[inode]
        elif inode in self._names or self._is_folder.get(inode, path == Path()):
            yield path, None
            for name, below in names.items():
                yield from self._by_syncs(path / name, below, besides)
        elif besides and inode in self._is_folder:
            yield path, b""

    def _eager(self, folder: Path) -> Iterator[tuple[Path, bytes | None]]:
        for path in [folder, *folder.rglob("*")]:
            content = None if path.is_dir() else self._contents.get(path.stat().st_ino, b"")
            yield path.relative_to(folder), content


@contextmanager
def recorded(root: Path, *, skipped: frozenset[int] = frozenset()) -> Iterator[Record]:
    """Notes what is synced under `root`, which is on the disk itself, with what lies in it now.

    `skipped` are the numbers of syncs that do nothing, as if they had been left out of the program.
    """
    record = Record(root)
    for path in [*(path for path in root.rglob("*")), root]:
        record._note(path, path.stat())
    record.skipped = skipped
    try:
        with patch.object(os, "fsync", record.sync):
            yield record
        record.note_instant()
    finally:
        record.close()


def lay_out(tree: Tree, target: Path) -> Path:
    """Makes `target` what was left."""
    for path, content in sorted(tree.items()):
        if content is None:
            (target / path).mkdir(parents=True)
        else:
            (target / path).write_bytes(content)
            (target / path).chmod(0o600)
    return target
