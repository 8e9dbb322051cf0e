"""What a node is to run: the manifest that the swarm shares, and where this node's own data files lie."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.config.manifest import RunManifest, load_manifest, parse_manifest, preset_for_task
from ftis_node.errors import ConfigError, DamagedError
from ftis_node.node.find_run import is_run_id
from ftis_node.node.first_look import trained_runs
from ftis_node.tasks import held_out_spec, parse_spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftis_node.config.home import Home

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """`manifest.task` is the canonical SPEC; `task_spec` is the same with this node's paths."""

    manifest: RunManifest
    task_spec: str
    eval_specs: tuple[str, ...]
    """What is evaluated on; empty: this node has no held-out problems."""


def plan_run(
    run: str | None,
    task: str | None,
    *,
    eval_task: str | None = None,
    home: Home,
    find: Callable[[str], RunManifest] | None = None,
) -> RunPlan:
    """The plan that the flags of `join` describe.

    Without a run, the home's own; in a new home the preset that fits the task. A task replaces the manifest's: the
    run id follows from the result, so nodes with different tasks never mix. `find` gets a manifest by its run id from
    the swarm, where the home has not got it. Raises ConfigError, TaskError, and what `find` raises.
    """
    own = own_manifest(home, is_given=run is not None)
    if own is not None and run in (None, own.run_id):
        manifest = own
    elif run is not None and is_run_id(run) and find is not None:
        manifest = find(run)
    else:
        manifest = load_manifest(run or preset_for_task(task or ""))
    spec = parse_spec(task or manifest.task)
    manifest = manifest.model_copy(update={"task": spec.canonical})
    _check_same_run(manifest, own, home)
    held_out = parse_spec(eval_task) if eval_task else held_out_spec(spec)
    return RunPlan(manifest=manifest, task_spec=str(spec), eval_specs=(str(held_out),) if held_out else ())


def own_manifest(home: Home, *, is_given: bool) -> RunManifest | None:
    """The manifest in the home; None in a new one, and where it is damaged and the start says which run is meant.

    Only the checkpoints know then whether that is the home's run. Raises DamagedError.
    """
    if not home.run_toml.exists():
        return None
    trained = trained_runs(home)
    try:
        manifest = parse_manifest(home.run_toml.read_text(), source=str(home.run_toml))
        if not trained or manifest.run_id in trained:
            return manifest
        why = f"it is of run {manifest.run_id}, the checkpoints are of another"
    except (ConfigError, UnicodeDecodeError) as error:
        why = str(error).removeprefix(f"{home.run_toml}").lstrip(": ")
    if not is_given:
        which = f"run {trained[0]}" if trained else "this home's run"
        raise DamagedError(f"{home.run_toml} is damaged ({why}): start once with --run and the manifest of {which}")
    if trained:
        log.warning("%s is damaged (%s): the manifest that --run gives takes its place", home.run_toml, why)
        return None
    raise DamagedError(f"{home.run_toml} is damaged ({why}) and nothing was trained yet: remove it")


def _check_same_run(manifest: RunManifest, own: RunManifest | None, home: Home) -> None:
    """A home holds the checkpoints and groups of one run."""
    if own is not None and own.run_id != manifest.run_id:
        raise ConfigError(
            f"{home.root} belongs to run {own.name} ({own.run_id[:12]}, task {own.task}), not to {manifest.name} "
            f"({manifest.run_id[:12]}, task {manifest.task}): give another --home for another run"
        )
    trained = trained_runs(home) if own is None else []
    if trained and manifest.run_id not in trained:
        raise ConfigError(
            f"{home.root} belongs to run {trained[0]}, not to {manifest.name} ({manifest.run_id}): give the manifest "
            "of that run, or another --home"
        )
