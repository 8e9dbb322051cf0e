"""Durable writes survive a power cut at every instant, and each of their syncs is necessary.

A `DurableWrite` has the state before, the write, and the state that a start reads. At every instant the start must read
the old or the new state, and the new one after the write has returned.

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
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from ftis_node.config.home import Home
from ftis_node.config.home_files import mark, marked_epoch
from ftis_node.files import replace_file
from ftis_node.learner.checkpoint.checkpoint import (
    CheckpointOwner,
    TrainingProgress,
    gather,
    newest_usable,
    state_of,
    write_checkpoint,
)
from ftis_node.node.peers.reputation_store import ReputationStore
from ftis_node.records.identity import Identity
from ftis_node.replay.database import open_writer
from ftis_node.workers.durable import complete_folder, newest_complete

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


OWNER = CheckpointOwner(run_id="r", model="m", model_fingerprint="f", trains="full")
SEED = bytes(range(32))


@dataclass(frozen=True)
class DurableWrite:
    """One durable write of the node. `found` returns "old", "new" or a description of another state, which is wrong.

    `equivalent` syncs, of one folder, are skipped together, because each alone is enough.
    """

    name: str
    prepare: Callable[[Path], object]
    write: Callable[[Path], object]
    found: Callable[[Path], str]
    equivalent: frozenset[int] = frozenset()


def _file_found(name: str) -> Callable[[Path], str]:
    return lambda root: (root / name).read_text() if (root / name).exists() else "gone"


def _save_checkpoint(root: Path, step: int) -> None:
    weight = torch.nn.Parameter(torch.full((2, 3), float(step)))
    state = state_of(OWNER, TrainingProgress(step=step, policy_version=step))
    kept = gather({"weight": weight}, torch.optim.AdamW([weight]))
    write_checkpoint(Home(root / "home").checkpoints, state, *kept, keep=2)


def _checkpoint_found(root: Path) -> str:
    found, damaged = newest_usable(Home(root / "home").checkpoints, owner=OWNER)
    if damaged or found is None:
        return f"{found and found.state.step}, damaged: {damaged}"
    return {1: "old", 2: "new"}[found.state.step]


def _make_home_with_checkpoint(root: Path) -> None:
    Home(root / "home").create()
    _save_checkpoint(root, 2)


def _first_checkpoint_found(root: Path) -> str:
    found = newest_complete(Home(root / "home").checkpoints, "step-")
    return "old" if found is None else _checkpoint_found(root)


def _identity_found(root: Path) -> str:
    path = root / "identity.key"
    return "old" if not path.exists() else "new" if Identity.load(path).seed == SEED else "another"


def _marked_found(root: Path) -> str:
    return "new" if marked_epoch(Home(root)) else "old"


def _replace_folder(root: Path, text: str) -> None:
    with complete_folder(root / "version-1") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text(text)


DURABLE_WRITES = [
    DurableWrite("checkpoint", lambda root: _save_checkpoint(root, 1), lambda root: _save_checkpoint(root, 2),
        _checkpoint_found),
    DurableWrite("first checkpoint of a new home", lambda root: None, _make_home_with_checkpoint,
        _first_checkpoint_found, equivalent=frozenset({1, 2, 3})),
    DurableWrite("identity", lambda root: None, lambda root: Identity.from_seed(SEED).save(root / "identity.key"),
        _identity_found),
    DurableWrite("home's epoch", lambda root: None, lambda root: mark(Home(root), epoch=7), _marked_found),
    DurableWrite("manifest and settings", lambda root: (root / "run.toml").write_text("old"),
        lambda root: replace_file(root / "run.toml", b"new"), _file_found("run.toml")),
    DurableWrite("weights of a generator", lambda root: None, lambda root: _replace_folder(root, "new"),
        lambda root: _file_found("inner/file")(found) if (found := newest_complete(root, "version-")) else "old"),
]  # fmt: skip


def _wrong_states(
    durable: DurableWrite, folder: Path, *, skipped: frozenset[int] = frozenset()
) -> tuple[list[str], int]:
    """Return the wrong states over all instants and disks, and the number of syncs."""
    root = folder / "disk"
    root.mkdir(parents=True)
    durable.prepare(root)
    with recorded(root, skipped=skipped) as record:
        durable.write(root)
    wrong = []
    seen: dict[frozenset[tuple[Path, bytes | None]], str] = {}
    for instant, remaining in enumerate(record.remaining):
        is_done = instant == len(record.remaining) - 1
        for disk, tree in remaining.items():
            if (found := seen.get(frozenset(tree.items()))) is None:
                found = seen[frozenset(tree.items())] = _state_at_start(durable, tree, folder / f"{disk}-{instant}")
            if found not in (("new",) if is_done else ("old", "new")):
                wrong.append(f"{disk}, cut after sync {instant}: {found}")
    return wrong, len(record.synced)


def _state_at_start(durable: DurableWrite, tree: Tree, target: Path) -> str:
    try:
        return durable.found(lay_out(tree, target))
    except Exception as error:  # the start would fail with any of these
        return repr(error)


@pytest.mark.parametrize("durable", DURABLE_WRITES, ids=lambda durable: durable.name)
def test_a_power_cut_leaves_the_old_or_the_new_state_and_each_sync_is_necessary(durable, tmp_path):
    wrong, num_syncs = _wrong_states(durable, tmp_path / "all")
    assert not wrong
    alone = [frozenset({number}) for number in range(num_syncs) if number not in durable.equivalent]
    for skipped in [*alone, durable.equivalent] if durable.equivalent else alone:
        name = "-".join(map(str, sorted(skipped)))
        wrong, _ = _wrong_states(durable, tmp_path / f"without-{name}", skipped=skipped)
        assert wrong, f"without sync {name} of {durable.name} no cut leaves a wrong state"


def test_databases_sync_every_commit(tmp_path):
    store = ReputationStore(tmp_path / "peers.sqlite")
    with closing(open_writer(tmp_path / "replay.sqlite")) as groups, closing(store):
        for database in (groups, store._db):
            assert database.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
            assert database.execute("PRAGMA synchronous").fetchone()[0] == 2, "2 is FULL"
