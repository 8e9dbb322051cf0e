"""Checkpoints of former formats, made readable for `checkpoint.py` where they lie.

    format 1    no `last_groups` in state.json, no checksums.json
    format 2    both

Their owner is named by the run's id, and that is a hash of the manifest with every default written: a manifest that was
made before a setting existed has another id since. A home belongs to one run, so its checkpoints are given the id that
its manifest has now. The tensors are not touched. `state.json` is replaced last and in one step: until
then the checkpoint is an older one, whatever a stopped machine left half done, and is renewed the next time.
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
    """Those in `folder` that `renew` would change. `run_id` None: whatever they name is right."""
    complete = [path for path in sorted(folder.glob(f"{PREFIX}*")) if is_complete(path)]
    return [path for path in complete if _is_older(path, run_id)]


def renew(path: Path, *, run_id: str | None, groups_of: Callable[[int], Sequence[str]]) -> None:
    """Brings one to the present format. `groups_of` gives the ids of the groups that a step took. Raises OSError."""
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
    """`state.json`; None where it is none: the learner, when it starts, says so and sets the checkpoint aside."""
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
