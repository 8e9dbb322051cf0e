"""The content of a folder after a power cut: only synced content and names remain.

`recorded` records each `os.fsync`: the content of a file, the names in a folder. From this, `lay_out` writes the folder
as it would be after a cut at any of these instants, for each of three model disks:

| disk | content after a cut |
|---|---|
| strict | the synced names and contents only |
| eager | all names, and the synced contents only; other files are empty |
| backwards | as strict, and the newest unsynced name of each folder |

A real disk behaves between these models. The syncs of SQLite happen in C and are not recorded.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

Tree = dict[Path, bytes | None]  # by path: the content of a file, or None for a folder
SYNC = os.fsync


@dataclass
class Record:
    """The syncs of one block: the synced names, and by instant what a cut would leave on each disk."""

    root: Path
    skipped: frozenset[int] = frozenset()  # positions of syncs that have no effect
    synced: list[str] = field(default_factory=list)
    remaining: list[dict[str, Tree]] = field(default_factory=list)
    _contents: dict[int, bytes] = field(default_factory=dict)
    _names: dict[int, dict[str, int]] = field(default_factory=dict)
    _is_folder: dict[int, bool] = field(default_factory=dict)
    _pinned: list[int] = field(default_factory=list)  # open descriptors, so that no inode number is reused

    def sync(self, descriptor: int) -> None:
        """Replace `os.fsync`, and record an instant before and after it."""
        self.record_instant()
        SYNC(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.synced.append(path.name)
        if len(self.synced) - 1 not in self.skipped:
            self._record(path, os.fstat(descriptor))
        self.record_instant()

    def record_instant(self) -> None:
        """Record what a cut now would leave."""
        root, newest = self.root.stat().st_ino, self._newest_names()
        self.remaining.append(
            {
                "strict": dict(self._by_syncs(Path(), root, {})),
                "eager": dict(self._eager(self.root)),
                "backwards": dict(self._by_syncs(Path(), root, newest)),
            }
        )

    def close(self) -> None:
        """Close the pinned descriptors."""
        for descriptor in self._pinned:
            os.close(descriptor)

    def _record(self, path: Path, status: os.stat_result) -> None:
        self._pin(path)
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = {name.name: self._pin(name) for name in path.iterdir()}
        else:
            self._contents[status.st_ino] = path.read_bytes()

    def _pin(self, path: Path) -> int:
        self._pinned.append(os.open(path, os.O_RDONLY))
        return os.fstat(self._pinned[-1]).st_ino

    def _newest_names(self) -> dict[int, dict[str, int]]:
        """Return the newest unsynced name in each folder, by the folder's inode."""
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
        self, path: Path, inode: int, additional: dict[int, dict[str, int]]
    ) -> Iterator[tuple[Path, bytes | None]]:
        names = self._names.get(inode, {}) | additional.get(inode, {})
        if inode in self._contents:
            yield path, self._contents[inode]
        elif inode in self._names or self._is_folder.get(inode, path == Path()):
            yield path, None
            for name, below in names.items():
                yield from self._by_syncs(path / name, below, additional)
        elif additional and inode in self._is_folder:
            yield path, b""

    def _eager(self, folder: Path) -> Iterator[tuple[Path, bytes | None]]:
        for path in [folder, *folder.rglob("*")]:
            content = None if path.is_dir() else self._contents.get(path.stat().st_ino, b"")
            yield path.relative_to(folder), content


@contextmanager
def recorded(root: Path, *, skipped: frozenset[int] = frozenset()) -> Iterator[Record]:
    """Record the syncs under `root`. Its present content counts as synced.

    `skipped` are the positions of syncs that have no effect, as if the program did not call them.
    """
    record = Record(root)
    for path in [*root.rglob("*"), root]:
        record._record(path, path.stat())
    record.skipped = skipped
    try:
        with patch.object(os, "fsync", record.sync):
            yield record
        record.record_instant()
    finally:
        record.close()


def lay_out(tree: Tree, target: Path) -> Path:
    for path, content in sorted(tree.items()):
        if content is None:
            (target / path).mkdir(parents=True)
        else:
            (target / path).write_bytes(content)
            (target / path).chmod(0o600)
    return target
