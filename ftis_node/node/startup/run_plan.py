"""The plan of a start: the run manifest that the swarm shares, and the paths of this node's data files."""

from __future__ import annotations

import asyncio
import logging
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ftis_node.config.home import Home
from ftis_node.config.manifest import (
    MAX_TASK_CHARS,
    PRESETS,
    RunManifest,
    load_manifest,
    parse_canonical,
    preset_for_task,
)
from ftis_node.config.node import NodeSettings
from ftis_node.errors import ConfigError, FileError, TaskError, UsageError
from ftis_node.files import read_object
from ftis_node.node.startup.previous_run import check_same_run, own_manifest
from ftis_node.records.envelope import MAX_DOMAIN_BYTES
from ftis_node.tasks import TaskSpec, held_out_spec, is_domain, parse_spec
from ftis_node.tasks.dataset_task import pinned

log = logging.getLogger(__name__)
TIMEOUT_S = 60.0
RUN_ID = re.compile(r"[0-9a-f]{32}")


def is_run_id(run: str) -> bool:
    """Return whether `run` is a run id. It can also be the name of a preset or a file."""
    return RUN_ID.fullmatch(run) is not None


def find_run(run_id: str, settings: NodeSettings) -> RunManifest:
    """Ask the given peers for the manifest of a run.

    Raise UsageError without peers, and NetworkError if no peer has it. Raise ConfigError if this version does not
    understand the manifest, or if the parsed manifest has another run id. The id is a hash of the text, so a text that
    is not in canonical form has another id.
    """
    from ftis_node.gossip.directory.lookup import find_manifest
    from ftis_node.gossip.settings import NetworkSettings

    if not settings.peers:
        raise UsageError("a run is found by its id through a peer: give --peers, or --run with a preset or a file")
    with tempfile.TemporaryDirectory(prefix="ftis-look-", ignore_cleanup_errors=True) as folder:
        network = NetworkSettings(sockets_dir=Path(folder), listen=settings.listen, peers=settings.peers)
        canonical = asyncio.run(find_manifest(network, run_id=run_id, timeout_s=TIMEOUT_S))
    manifest = parse_canonical(canonical, source=f"run {run_id}")
    if manifest.run_id != run_id:
        raise ConfigError(
            f"the manifest of run {run_id} is not in the canonical form: here its id is {manifest.run_id}; "
            "ask for its TOML file, and give --run FILE"
        )
    return manifest


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The run, task and evaluations of one start.

    `manifest.task` is the canonical SPEC; `task_spec` is the same with this node's paths. `eval_specs` are the tasks to
    evaluate on, empty if this node has no held-out problems. `domain_spec` is the task that this node generates for:
    some parts of the run's task, in its own proportions; None for the whole task.
    """

    manifest: RunManifest
    task_spec: str
    eval_specs: tuple[str, ...]
    domain_spec: str | None = None


def plan_run(
    run: str | None,
    task: str | None,
    *,
    eval_task: str | None = None,
    home: Home,
    find: Callable[[str], RunManifest] | None = None,
    data_paths: Mapping[str, str] | None = None,
) -> RunPlan:
    """Return the plan that the flags of `join` describe.

    Without a run, use that of the home; in a new home, the preset that fits the task. If the run mixes several tasks
    and `task` names only parts of them, these become the node's domain and the run stays. Else `task` replaces the
    manifest's task. The run id follows from the result, so nodes of different runs never mix. Without a task a home
    keeps its domain.

    `find` fetches a manifest by its run id from the swarm if the home does not have it. `data_paths` are files of
    parts that `task` does not name.

    Raise ConfigError, TaskError, and the errors of `find`.
    """
    own = own_manifest(home, is_given=run is not None)
    if own is not None and run in (None, own.run_id):
        manifest = own
    elif run is not None and is_run_id(run) and find is not None:
        manifest = find(run)
    else:
        manifest = load_manifest(run or preset_for_task(task or ""), task=parse_spec(task).canonical if task else None)
    mixture = parse_spec(manifest.task)
    requested = parse_spec(task) if task else None if own is None else kept_domain(home, manifest)
    paths = _paths_in_file(run, mixture) | dict(data_paths or {}) | (requested.paths if requested else {})
    pinned_mixture = pinned(mixture.with_paths(paths))
    if run == manifest.run_id and pinned_mixture.canonical != mixture.canonical:
        raise ConfigError(f"run {run} does not pin its data set (no sha256 in {manifest.task!r}): join another run")
    mixture = pinned_mixture
    requested = pinned(requested.with_paths(paths), mixture) if requested else None
    if requested is not None:
        _log_replaced_queries(requested, mixture)
    manifest = manifest.model_copy(update={"task": (requested or mixture).canonical})
    domain = None
    is_run_meant = run is not None or own is not None  # else the preset is only a template for a run of this task
    if requested is not None and is_run_meant and is_domain(requested, mixture):
        _check_domain(requested, manifest)
        domain = requested
        manifest = manifest.model_copy(update={"task": mixture.canonical})
    check_same_run(manifest, own, home)
    if len(manifest.task) > MAX_TASK_CHARS:
        raise ConfigError(f"the task has {len(manifest.task)} characters, at most {MAX_TASK_CHARS}: name fewer parts")
    spec = parse_spec(manifest.task).with_paths(paths)
    held_out = parse_spec(eval_task) if eval_task else held_out_spec(spec)
    return RunPlan(
        manifest=manifest,
        task_spec=str(spec),
        eval_specs=(str(held_out),) if held_out else (),
        domain_spec=str(domain.with_paths(from_anywhere(spec.paths))) if domain else None,
    )


def _paths_in_file(run: str | None, mixture: TaskSpec) -> dict[str, str]:
    """Return the data files that a run file names, relative to its folder; {} if the user named no such file.

    A manifest of the swarm may name any file of this machine, and none of them is read.
    """
    if run is None or is_run_id(run) or run in PRESETS:
        return {}
    folder = Path(run).expanduser().absolute().parent
    return {name: str(folder / Path(path).expanduser()) for name, path in mixture.paths.items()}


def _log_replaced_queries(requested: TaskSpec, mixture: TaskSpec) -> None:
    queries = {part.name: part.query for part in mixture.parts}
    for part in requested.parts:
        replaced = queries.get(part.name)
        if part.query is None or replaced is None:
            continue
        ours, theirs = part.query.without_source(), replaced.without_source()
        if ours != theirs:
            log.warning("--task replaces the run's settings of %s: %s instead of %s", part.name, ours, theirs)


def kept_domain(home: Home, manifest: RunManifest) -> TaskSpec | None:
    """Return the domain of the home's last start from `settings.json`; None if it has none that is part of this run."""
    try:
        spec = parse_spec(read_object(home.settings)["task"])
    except (OSError, FileError, KeyError, TypeError, AttributeError, TaskError):
        return None  # settings of an older version, damaged, or missing
    return spec if is_domain(spec, parse_spec(manifest.task)) else None


def _check_domain(domain: TaskSpec, manifest: RunManifest) -> None:
    if manifest.step.prompt_sharing == "horizontal":
        raise ConfigError(
            f'run {manifest.name} has no domains (step.prompt_sharing = "horizontal"): '
            f'omit --task {domain.canonical}, or join a run whose step.prompt_sharing is "vertical"'
        )
    if len(domain.canonical.encode()) > MAX_DOMAIN_BYTES:
        raise ConfigError(f"the domain has more than {MAX_DOMAIN_BYTES} bytes: name fewer parts, or simpler weights")


def from_anywhere(paths: Mapping[str, str]) -> dict[str, str]:
    """Return absolute data paths, so that a later start may use another working directory."""
    return {name: str(Path(path).expanduser().absolute()) for name, path in paths.items()}
