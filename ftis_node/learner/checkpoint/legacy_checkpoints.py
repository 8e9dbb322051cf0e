"""In-place migration of checkpoints of former formats to the one that `checkpoint.py` reads.

    format 1    no `last_groups` in state.json, no checksums.json
    format 2    both

A checkpoint names its owner by the run's id, a hash of the manifest with every default written. So a new setting
changes the id of an older manifest. A home belongs to one run, so migration writes the manifest's present id into its
checkpoints. The tensors are not touched. `state.json` is replaced last and atomically. Until then the checkpoint keeps
its old format, and the next start repeats an interrupted migration.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ftis_node.config.disk_room import replace_file, sync_to_disk
from ftis_node.errors import FileError, ModelError
from ftis_node.files import read_object
from ftis_node.learner.checkpoint.checksum import CHECKSUMS_FILE, checksum_of, read_checksums
from ftis_node.workers.durable import is_complete

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PREFIX = "step-"
STATE_FILE = "state.json"
TENSOR_FILES = ("weights.safetensors", "optimizer.safetensors")
FORMAT = 2


def older_checkpoints(folder: Path, *, run_id: str | None) -> list[Path]:
    """Return the checkpoints in `folder` that `renew` would change. `run_id` None: their stored id is correct."""
    complete = [path for path in sorted(folder.glob(f"{PREFIX}*")) if is_complete(path)]
    return [path for path in complete if _is_older(path, run_id)]


def renew(path: Path, *, run_id: str | None, groups_of: Callable[[int], Sequence[str]]) -> None:
    """Convert a checkpoint to the present format. `groups_of` returns the ids of the groups that a step took. Raises
    OSError.
    """
    state = _read(path)
    if state is None:
        return
    if run_id is not None:
        state["owner"]["run_id"] = run_id
    state.setdefault("last_groups", list(groups_of(int(state["step"]))))
    state["format"] = FORMAT
    renewed = path / f"renewed-{STATE_FILE}"
    replace_file(renewed, json.dumps(state, indent=2).encode())
    known = _sums(path)
    sums = {name: known.get(name) or checksum_of(path / name) for name in TENSOR_FILES}
    sums |= {STATE_FILE: checksum_of(renewed)}
    replace_file(path / CHECKSUMS_FILE, json.dumps(sums, indent=2).encode())
    renewed.replace(path / STATE_FILE)
    sync_to_disk(path)


def _is_older(path: Path, run_id: str | None) -> bool:
    state = _read(path)
    if state is None:
        return False
    return bool(state["format"] < FORMAT or (run_id is not None and state["owner"]["run_id"] != run_id))


def _read(path: Path) -> dict[str, Any] | None:
    """Return `state.json`, or None if it is invalid: the learner renames such a checkpoint at its start."""
    try:
        state = read_object(path / STATE_FILE)
        known = isinstance(state["format"], int) and isinstance(state["step"], int) and "run_id" in state["owner"]
    except (OSError, FileError, KeyError, TypeError):
        return None
    whole = all((path / name).exists() for name in TENSOR_FILES)
    return dict(state) if known and whole and state["format"] <= FORMAT else None


def _sums(path: Path) -> dict[str, str]:
    try:
        return read_checksums(path)
    except ModelError:
        return {}
