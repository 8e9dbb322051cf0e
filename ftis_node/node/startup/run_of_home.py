"""The run to which a home belongs, by its manifest, its checkpoints and its last status."""

from __future__ import annotations

import logging

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest, load_manifest
from ftis_node.errors import ConfigError, DamagedError, FileError
from ftis_node.files import check_regular, read_object
from ftis_node.memory.choice import checkpoint_owner
from ftis_node.workers.durable import CHECKPOINT_PREFIX

log = logging.getLogger(__name__)


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
