"""Runs an experiment: its trials in parallel processes, each result on disk as soon as it is available.

    trial matrix --trials--> process pool, one core each --> out/runs/<key>.json --> results.json, curves.csv, plots

A trial whose result exists is not run again. A key is a digest of all that determines a result: the options, the
device, and the content of models and data. Paths and environment variables are not in it. Releases of the code, torch
and Python are not in it either: each result names its own (`made_by`). Trials with one key run once: their results
differ in their labels only.

The homes are temporary, in memory if possible, because waiting for the disk would take most of the time. The next
experiment removes folders of killed processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from ftis_node.lab.experiment.pool import call_in_processes, report
from ftis_node.lab.experiment.trial import Trial, run_trial
from ftis_node.lab.experiment.trial_result import TrialResult
from ftis_node.models import PromptSettings, load_tokenizer, model_fingerprint, pick_device, resolve_model
from ftis_node.models.adapter_folder import ADAPTER_FILE
from ftis_node.tasks import TaskSpec, grader_releases, load_task, parse_spec
from ftis_node.telemetry.log import OnProgress
from ftis_node.workers.weight_store import MEMORY_DISK

SCRATCH_PREFIX = "ftis-compare-"
FAILURE = "a trial failed; those that are done are kept"
NUM_HASHED: Final = 512  # problems of a split that code generates; of a data set all


def run_trials(trials: Sequence[Trial], out: Path, *, jobs: int, watch: OnProgress) -> list[TrialResult]:
    """Run `jobs` trials at a time; return all results, in order. Raises the FtisError of the first failure."""
    runs = out / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    trials = with_keys(trials)
    by_key = {trial.key: trial for trial in trials}
    missing = [trial for trial in by_key.values() if not _file(runs, trial).exists()]
    if missing:
        total = sum(_weight(trial) * trial.steps for trial in missing)

        def show(steps: Mapping[str, float], num_left: int) -> None:
            done = sum(_weight(trial) * steps[trial.key] for trial in missing)
            watch(done / total, f"{len(by_key) - num_left} of {len(by_key)} done")

        with scratch_folder() as scratch:
            calls = {trial.key: (trial, runs, scratch) for trial in missing}
            call_in_processes(_run_one, calls, jobs=jobs, watch=show, failure=FAILURE)
    return [_read(runs, trial) for trial in trials]


def _weight(trial: Trial) -> int:
    step = trial.manifest.step
    return len(trial.members) * (step.own_groups + step.foreign_groups) * trial.manifest.sampling.group_size


def _run_one(trial: Trial, runs: Path, scratch: Path) -> None:
    result = run_trial(trial, lambda step: report(trial.key, step), scratch=scratch)
    target = _file(runs, trial)
    temporary = target.with_suffix(".making")
    temporary.write_bytes(msgspec.json.encode(result))
    temporary.replace(target)


def _read(runs: Path, trial: Trial) -> TrialResult:
    """Return a stored result with this experiment's labels, because several experiments may contain the same trial."""
    stored = msgspec.json.decode(_file(runs, trial).read_bytes(), type=TrialResult)
    return msgspec.structs.replace(stored, labels=trial.labels)


def _file(runs: Path, trial: Trial) -> Path:
    return runs / f"{trial.key}.json"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    root = MEMORY_DISK if os.access(MEMORY_DISK, os.W_OK) else Path(tempfile.gettempdir())
    for folder in root.glob(f"{SCRATCH_PREFIX}*"):
        pid = folder.name.removeprefix(SCRATCH_PREFIX)
        if not pid.isdecimal() or not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)  # cannot remove folders of other users
    own = root / f"{SCRATCH_PREFIX}{os.getpid()}"
    shutil.rmtree(own, ignore_errors=True)  # left by an earlier process with the same pid
    own.mkdir(mode=0o700)  # raises if another user created something at this path
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def with_keys(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials with their keys. It reads each model and each data set once.

    Raises ModelError, TaskError, NetworkError, and MachineError for a missing GPU.
    """
    model, problems = cache(_model), cache(_problems)
    return [replace(trial, key=_key(trial, model, problems)) for trial in trials]


def options_of(trial: Trial) -> str:
    """Return all options that determine a result, as they are spelled. Of equal ones, one trial is enough."""
    return json.dumps(_description(trial, lambda model: model, lambda *spec: spec), sort_keys=True)


def _key(trial: Trial, model: Callable[[str], Any], problems: Callable[[str, str], Any]) -> str:
    described = _description(trial, model, problems) | {"device": pick_device(trial.device)}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    return f"{trial.members[0].name}-{trial.labels['method'].split(':')[0]}-{digest}"


def _description(trial: Trial, model: Callable[[str], Any], problems: Callable[[str, str], Any]) -> dict[str, Any]:
    """Describe a trial. `model` describes a model, `problems` the problems of a SPEC and a split."""
    final = trial.final_evaluation
    return {
        "manifest": trial.manifest.model_dump(mode="json"),
        "members": [
            asdict(member)
            | {"model": model(member.model), "domain": member.domain and problems(member.domain, "train")}
            for member in trial.members
        ],
        "train": problems(trial.task_spec, "train"),
        "test": [problems(spec, "test") for spec in trial.eval_specs],
        "delay": asdict(trial.delay),
        "seed": trial.seed,
        "first_place": trial.first_place,
        "steps": trial.steps,
        "adapter": trial.lora_adapter.model_dump(),
        "codec": trial.codec,
        "apart": trial.apart,
        "final_evaluation": final and asdict(final) | {"tasks": [problems(spec, "test") for spec in final.tasks]},
        **({"asynchronous": True} if trial.is_asynchronous else {}),
    }


def _model(name: str) -> list[Any]:
    """Describe a model by its configuration, the content of its weights, and its tokenizer."""
    source = resolve_model(name)
    tokenizer = load_tokenizer(source, prompts=PromptSettings())
    weights = []
    for path in (*source.weights_files, *([source.adapter / ADAPTER_FILE] if source.adapter else [])):
        with path.open("rb") as file:
            weights.append(hashlib.file_digest(file, "sha256").hexdigest())
    text = [tokenizer.fingerprint, tokenizer.template_digest, tokenizer.eos_ids]
    return [model_fingerprint(source), weights, *text]


def _problems(spec: str, split: str) -> list[Any]:
    """Describe the problems of a split by their content, and the packages that score them."""
    found = []
    for part in parse_spec(spec).parts:
        task = load_task(TaskSpec((part,)), split=split)
        digest = hashlib.sha256()
        for index in range(len(task) if part.takes_path else min(len(task), NUM_HASHED)):
            item = task[index]
            digest.update(json.dumps([item.prompt, item.answer]).encode() + b"\n")
        found.append([str(replace(part, path=None)), grader_releases(task), len(task), digest.hexdigest()])
    return found
