"""Folders that are written atomically: checkpoints and published weights.

The files go to a folder under a temporary name and are synced. The folder is renamed, and the marker file `COMPLETE` is
written last. Readers use only marked folders, so after a crash or a full disk the previous folder stays the newest.
Folders of a kind are named by a prefix and a running number: `step-00000120`.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ftis_node.files import make_folder, sync_to_disk

MARKER = "COMPLETE"
CHECKPOINT_PREFIX, DAMAGED_PREFIX = "step-", "damaged-"
STATE_FILE = "state.json"  # of a checkpoint
TEMPORARY_MARK = ".incomplete-"


@contextmanager
def complete_folder(target: Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary folder beside `target`; rename it to `target` if the block succeeds, else remove it.

    An existing `target` is replaced. Raises OSError (no space left, for example), and then `target` is unchanged.
    Without `sync` the folder is complete or absent after a crash of the process, but not after a power cut.
    """
    make_folder(target.parent)
    temporary = _temporary_sibling(target)
    temporary.mkdir()
    try:
        yield temporary
        if sync:
            _sync_tree(temporary)
        _move_into_place(temporary, target, sync=sync)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _write_marker(target, sync=sync)


def is_complete(path: Path) -> bool:
    return (path / MARKER).is_file()


def newest_complete(parent: Path, prefix: str) -> Path | None:
    """Return the complete folder `<prefix><number>` in `parent` with the highest number; None if there is none."""
    numbered = _complete_by_number(parent, prefix)
    return numbered[-1] if numbered else None


def checkpoint_step(checkpoints: Path) -> int:
    """Return the step of the newest checkpoint in a folder, 0 without one."""
    newest = newest_complete(checkpoints, CHECKPOINT_PREFIX)
    return 0 if newest is None else int(newest.name.removeprefix(CHECKPOINT_PREFIX))


def keep_newest(parent: Path, prefix: str, keep: int) -> None:
    """Remove all but the `keep` newest complete folders."""
    assert keep >= 1, "the newest complete folder is never removed"
    for path in _complete_by_number(parent, prefix)[:-keep]:
        _remove(path)


def take_oldest(parent: Path, prefix: str, *, beyond: int) -> Path | None:
    """Return the oldest complete folder if there are more than `beyond`, without its marker, to reuse its files."""
    numbered = _complete_by_number(parent, prefix)
    if len(numbered) <= beyond:
        return None
    (numbered[0] / MARKER).unlink()
    return numbered[0]


def remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove the remains of crashes in `parent`: temporary folders, and `<prefix>...` folders without a marker.

    Only the folder's single writer may call it at its start, or another process after the writer's end. It also removes
    folders that a process is writing.
    """
    for path in list(parent.iterdir()) if parent.is_dir() else ():
        is_temporary = path.name.startswith(f".{prefix}") and TEMPORARY_MARK in path.name
        is_unmarked = path.name.startswith(prefix) and path.is_dir() and not is_complete(path)
        if is_temporary or is_unmarked:
            shutil.rmtree(path)


def _temporary_sibling(target: Path) -> Path:
    return target.with_name(f".{target.name}{TEMPORARY_MARK}{uuid.uuid4().hex[:8]}")


def _move_into_place(temporary: Path, target: Path, *, sync: bool) -> None:
    """Rename the folder. An existing target is renamed first, because a rename cannot replace a non-empty folder."""
    aside = _temporary_sibling(target)
    if is_replaced := target.exists():
        target.rename(aside)
    temporary.rename(target)
    if sync:
        sync_to_disk(target.parent)
    if is_replaced:
        shutil.rmtree(aside)


def _write_marker(target: Path, *, sync: bool) -> None:
    (target / MARKER).touch()
    if sync:
        sync_to_disk(target / MARKER)
        sync_to_disk(target)


def _remove(path: Path) -> None:
    """Remove a folder, the marker first, so that a partly removed folder does not count as complete.

    The process that removes the marker removes the folder: daemon and learner may both try.
    """
    try:
        (path / MARKER).unlink()
    except FileNotFoundError:
        return
    shutil.rmtree(path)


def _complete_by_number(parent: Path, prefix: str) -> list[Path]:
    if not parent.is_dir():
        return []
    numbered = [
        (int(number), path)
        for path in parent.iterdir()
        if path.name.startswith(prefix) and (number := path.name[len(prefix) :]).isdecimal() and is_complete(path)
    ]
    return [path for _, path in sorted(numbered)]


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            sync_to_disk(Path(root) / name)
        sync_to_disk(Path(root))
