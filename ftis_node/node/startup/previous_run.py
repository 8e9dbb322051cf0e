"""What the last start left in a home: the run to which the home belongs, and the status in `status.json`.

The home's manifest, its checkpoints and its last status name its run.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress

import msgspec

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest, load_manifest
from ftis_node.errors import ConfigError, DamagedError, FileError
from ftis_node.files import check_regular, read_file, read_object, replace_file
from ftis_node.memory.choice import checkpoint_owner
from ftis_node.telemetry.status import EndWord, Status
from ftis_node.workers.durable import CHECKPOINT_PREFIX, checkpoint_step

log = logging.getLogger(__name__)
STARTING = "starting"


def read_last_status(home: Home) -> Status:
    """Return the status that the last start saved; an empty status if the file is missing or damaged."""
    try:
        return Status.from_json(read_file(home.status))
    except (OSError, FileError, msgspec.MsgspecError):
        return Status()


def read_saved_status(home: Home) -> Status:
    """Return the last status if the home has the checkpoint of its last step, or a later one; else an empty one.

    The newest checkpoint is older if the disk was full, or if the operator restored one. The node then repeats the
    steps after it.
    """
    last = read_last_status(home)
    return last if checkpoint_step(home.checkpoints) >= last.learner.step else Status()


def mark_start(home: Home) -> None:
    """Save that the node starts, so that `status` after a kill shows neither an older end nor an empty home."""
    _change_node(home, state=STARTING, end="")


def mark_end(home: Home, end: EndWord) -> None:
    """Save how a start ended whose loops never ran. If they ran, the status loop saves the end."""
    if read_last_status(home).node.state == STARTING:
        with suppress(OSError):  # a full disk
            _change_node(home, state="stopped", end=end.value)


def _change_node(home: Home, **changes: str) -> None:
    try:
        document = read_object(home.status) if home.status.exists() else json.loads(Status().to_json())
    except (OSError, FileError):
        return  # the status loop replaces a damaged file
    if isinstance(document.get("node"), dict):
        document["node"] |= changes
        replace_file(home.status, json.dumps(document, indent=1).encode())


def trained_run(home: Home) -> str | None:
    """Return the run id that the newest readable checkpoint of a home names; None without one."""
    states = sorted(home.checkpoints.glob(f"{CHECKPOINT_PREFIX}*/state.json"), reverse=True)
    run_ids = (checkpoint_owner(state).get("run_id") for state in states)
    return next((run_id for run_id in run_ids if isinstance(run_id, str)), None)


def known_run(home: Home) -> str | None:
    """Return `trained_run`, or the run id in the last status if the home has no checkpoint, as a generator's home."""
    try:
        return trained_run(home) or str(read_object(home.status)["run"]["id"]) or None
    except (OSError, FileError, KeyError, TypeError):
        return None


def own_manifest(home: Home, *, is_given: bool) -> RunManifest | None:
    """Return the home's manifest; None in a new home, and if it is damaged but the start names the run.

    For a damaged manifest, only the checkpoints or the last status show the home's run. Raise DamagedError.
    """
    check_regular(home.run_toml)
    if not home.run_toml.exists():
        return None
    try:
        manifest = load_manifest(str(home.run_toml))
        if trained_run(home) in (None, manifest.run_id):
            return manifest
        why = f"it is of run {manifest.run_id}, the checkpoints are of another"
    except ConfigError as error:
        why = str(error).removeprefix(f"{home.run_toml}").lstrip(": ")
    run = known_run(home)
    if not is_given:
        which = f"run {run}" if run else "this home's run"
        raise DamagedError(f"{home.run_toml} is damaged ({why}): start once with --run and the manifest of {which}")
    if run is None:
        raise DamagedError(f"{home.run_toml} is damaged ({why}) and nothing was trained yet: remove it")
    log.warning("%s is damaged (%s): the manifest of --run replaces it", home.run_toml, why)
    return None


def check_same_run(manifest: RunManifest, own: RunManifest | None, home: Home) -> None:
    """Raise ConfigError if the home belongs to another run: a home holds checkpoints and groups of one run."""
    if own is not None and own.run_id != manifest.run_id:
        raise ConfigError(
            f"{home.root} belongs to run {own.name} ({own.run_id[:12]}, task {own.task}), not to {manifest.name} "
            f"({manifest.run_id[:12]}, task {manifest.task}): give another --home for another run"
        )
    if own is not None:
        return
    run = known_run(home) if home.run_toml.exists() else trained_run(home)  # it is there, and damaged
    if run not in (None, manifest.run_id):
        raise ConfigError(
            f"{home.root} belongs to run {run}, not to {manifest.name} ({manifest.run_id}): give the manifest "
            "of that run, or another --home"
        )
