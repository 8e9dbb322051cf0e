"""Runs an experiment: its trials in parallel processes, each result on disk as soon as it is available.

    trial matrix --trials--> process pool, one core each --> out/runs/<key>.json --> results.json, curves.csv, plots

A trial whose result exists is not run again. So an interrupted experiment continues, and an additional method costs
only its own trials.

A node writes its replay buffer and its weights with every step synced to disk. The homes of an experiment are
temporary, in memory if possible: waiting for the disk would take most of the time. A killed process cannot clean up,
so the next experiment removes folders of processes that no longer exist.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import shutil
import tempfile
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
from pebble import ProcessPool

from ftis_node.errors import FtisError, WorkerDiedError
from ftis_node.lab.experiment.trial_result import TrialResult
from ftis_node.workers.liveness import die_with_owner
from ftis_node.workers.weight_store import MEMORY_DISK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from multiprocessing.queues import Queue

    from ftis_node.lab.experiment.trial import Trial

    OnProgress = Callable[["ExperimentProgress"], None]

POLL_S = 0.5
_progress: Queue[tuple[str, int]] | None = None  # set in the processes of the pool, for their progress
SCRATCH_PREFIX = "ftis-compare-"


class ExperimentProgress(msgspec.Struct):
    trials_done: int
    num_trials: int
    fraction: float


def run_trials(trials: Sequence[Trial], out: Path, *, jobs: int, watch: OnProgress) -> list[TrialResult]:
    """Run `jobs` trials at a time; return all results, in order. Raises the FtisError of the first failure."""
    runs = out / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    missing = [trial for trial in trials if not _file(runs, trial).exists()]
    if missing:
        reporter = _ProgressReporter(missing, num_trials=len(trials), watch=watch)
        with scratch_folder() as scratch:
            _run_missing(missing, runs, scratch, jobs=jobs, reporter=reporter)
    return [_read(runs, trial) for trial in trials]


def _run_missing(
    missing: Sequence[Trial], runs: Path, scratch: Path, *, jobs: int, reporter: _ProgressReporter
) -> None:
    spawn = multiprocessing.get_context("spawn")
    steps: Queue[tuple[str, int]] = spawn.Queue()
    pool = ProcessPool(
        max_workers=min(jobs, len(missing)), context=spawn, initializer=_enter, initargs=(steps, os.getpid())
    )
    try:
        waiting: set[Future[None]] = {pool.schedule(_run_one, args=(trial, runs, scratch)) for trial in missing}
        while waiting:
            done, waiting = wait(waiting, timeout=POLL_S, return_when=FIRST_COMPLETED)
            for future in done:
                _raise_failure(future)
            with contextlib.suppress(queue.Empty):
                while True:
                    reporter.note(*steps.get_nowait())
            reporter.now(num_left=len(waiting))
    finally:
        pool.stop()
        pool.join()


def _raise_failure(future: Future[None]) -> None:
    try:
        future.result()
    except (FtisError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise WorkerDiedError(f"a trial failed: {error!r}; those that are done are kept") from error


class _ProgressReporter:
    """Reporter of the fraction done. A step weighs as many completions as all members of its trial train on."""

    def __init__(self, trials: Sequence[Trial], *, num_trials: int, watch: OnProgress) -> None:
        self._weights = {trial.key: _weight(trial) for trial in trials}
        self._steps = {trial.key: trial.steps for trial in trials}
        self._done = dict.fromkeys(self._weights, 0)
        self._num_trials = num_trials
        self._watch = watch

    def note(self, key: str, step: int) -> None:
        """Record that a trial has done this step."""
        self._done[key] = step

    def now(self, *, num_left: int) -> None:
        """Report the fraction done and the number of finished trials."""
        total = sum(self._weights[key] * steps for key, steps in self._steps.items())
        fraction = sum(self._weights[key] * done for key, done in self._done.items()) / total
        self._watch(ExperimentProgress(self._num_trials - num_left, self._num_trials, fraction))


def _weight(trial: Trial) -> int:
    step = trial.manifest.step
    return len(trial.members) * (step.own_groups + step.foreign_groups) * trial.manifest.sampling.group_size


def _enter(steps: Queue[tuple[str, int]], owner_pid: int) -> None:
    """Initialize a process of the pool: one core each, set before torch is imported."""
    global _progress
    die_with_owner(owner_pid)
    _progress = steps
    os.environ["OMP_NUM_THREADS"] = "1"


def _run_one(trial: Trial, runs: Path, scratch: Path) -> None:
    from ftis_node.lab.experiment.trial import run_trial

    def report(step: int) -> None:
        if _progress is not None:
            _progress.put((trial.key, step))

    result = run_trial(trial, report, scratch=scratch)
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
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Create a folder for this process and remove it at the end."""
    root = parent or (MEMORY_DISK if os.access(MEMORY_DISK, os.W_OK) else Path(tempfile.gettempdir()))
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
