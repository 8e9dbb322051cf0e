"""Runs an experiment: its trials in parallel processes, each result on disk as soon as it is available.

    trial matrix --trials--> process pool, one core each --> out/runs/<key>.json --> results.json, curves.csv, plots

A trial whose result exists is not run again. Trials with one key run once: their results differ in their labels only.
The homes are temporary, in memory if possible, because waiting for the disk would take most of the time. The next
experiment removes folders of killed processes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from ftis_node.lab.experiment.pool import call_in_processes, report
from ftis_node.lab.experiment.trial import Trial
from ftis_node.lab.experiment.trial_key import with_keys
from ftis_node.lab.experiment.trial_result import TrialResult
from ftis_node.telemetry.log import OnProgress
from ftis_node.workers.weight_store import MEMORY_DISK

SCRATCH_PREFIX = "ftis-compare-"
FAILURE = "a trial failed; those that are done are kept"


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
    from ftis_node.lab.experiment.trial import run_trial

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
