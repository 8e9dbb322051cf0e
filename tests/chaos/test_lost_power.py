"""Durable writes survive a power cut at every instant, and each of their syncs is necessary.

A `DurableWrite` has the state before, the write, and the state that a start reads. At every instant the start must read
the old or the new state, and the new one after the write has returned.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

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
from ftis_node.node.peers.store import PeerStore
from ftis_node.records.identity import Identity
from ftis_node.replay.database import open_writer
from ftis_node.workers.durable import complete_folder, newest_complete
from tests.chaos.lost_power import Tree, lay_out, recorded

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
    DurableWrite(
        "checkpoint", lambda root: _save_checkpoint(root, 1), lambda root: _save_checkpoint(root, 2), _checkpoint_found
    ),
    DurableWrite(
        "first checkpoint of a new home",
        lambda root: None,
        _make_home_with_checkpoint,
        _first_checkpoint_found,
        equivalent=frozenset({1, 2, 3}),
    ),
    DurableWrite(
        "identity",
        lambda root: None,
        lambda root: Identity.from_seed(SEED).save(root / "identity.key"),
        _identity_found,
    ),
    DurableWrite("home's epoch", lambda root: None, lambda root: mark(Home(root), epoch=7), _marked_found),
    DurableWrite(
        "manifest and settings",
        lambda root: (root / "run.toml").write_text("old"),
        lambda root: replace_file(root / "run.toml", b"new"),
        _file_found("run.toml"),
    ),
    DurableWrite(
        "weights of a generator",
        lambda root: None,
        lambda root: _replace_folder(root, "new"),
        lambda root: _file_found("inner/file")(found) if (found := newest_complete(root, "version-")) else "old",
    ),
]


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
    store = PeerStore(tmp_path / "peers.sqlite")
    with closing(open_writer(tmp_path / "replay.sqlite")) as groups, closing(store):
        for database in (groups, store._db):
            assert database.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
            assert database.execute("PRAGMA synchronous").fetchone()[0] == 2, "2 is FULL"
