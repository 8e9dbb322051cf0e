"""What a node is to run: the manifest that the swarm shares, and where this node's own data files lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.config.manifest import RunManifest, load_manifest, parse_manifest, preset_for_task
from ftis_node.errors import ConfigError
from ftis_node.tasks import held_out_spec, parse_spec

if TYPE_CHECKING:
    from ftis_node.config.home import Home


@dataclass(frozen=True, slots=True)
class RunPlan:
    """`manifest.task` is the canonical SPEC; `task_spec` is the same with this node's paths."""

    manifest: RunManifest
    task_spec: str
    eval_specs: tuple[str, ...]
    """What is evaluated on; empty: this node has no held-out problems."""


def plan_run(run: str | None, task: str | None, *, eval_task: str | None = None, home: Home) -> RunPlan:
    """The plan that the flags of `join` describe.

    Without a run, the home's own; in a new home the preset that fits the task. A task replaces the manifest's: the
    run id follows from the result, so nodes with different tasks never mix. Raises ConfigError, TaskError.
    """
    if run is None and home.run_toml.exists():
        manifest = parse_manifest(home.run_toml.read_text(), source=str(home.run_toml))
    else:
        manifest = load_manifest(run or preset_for_task(task or ""))
    spec = parse_spec(task or manifest.task)
    manifest = manifest.model_copy(update={"task": spec.canonical})
    _check_same_run(manifest, home)
    held_out = parse_spec(eval_task) if eval_task else held_out_spec(spec)
    return RunPlan(manifest=manifest, task_spec=str(spec), eval_specs=(str(held_out),) if held_out else ())


def _check_same_run(manifest: RunManifest, home: Home) -> None:
    """A home holds the checkpoints and groups of one run."""
    if not home.run_toml.exists():
        return
    owner = parse_manifest(home.run_toml.read_text(), source=str(home.run_toml))
    if owner.run_id != manifest.run_id:
        raise ConfigError(
            f"{home.root} belongs to run {owner.name} ({owner.run_id[:12]}, task {owner.task}), not to {manifest.name} "
            f"({manifest.run_id[:12]}, task {manifest.task}): give another --home for another run"
        )
