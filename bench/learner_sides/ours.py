"""The side of this project: a `Learner` in a separate thread, as in the learner's worker.

A step's `step_s` is the report's `duration_s`: batch, forward, loss, backward, clip, AdamW. `call_s` also holds the
publication of the new weights and their proof, which TRL's step has no counterpart for. The first turn, which does not
count, ends with the first step that measures the drift. Every fifth step does, for at most two groups.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import peft  # noqa: F401  imported before a LoRA case needs it, so that it is not memory of the step

from ftis_node.learner.learner import Learner
from ftis_node.learner.train_report import DRIFT_STEPS
from learner_sides.batch import memory_folder
from learner_sides.job import Job, read_groups
from learner_sides.serving import Serving


def main() -> None:
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    groups = read_groups(Path(job.batch).read_bytes())
    with memory_folder() as weights, ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(serve, job, groups, weights).result()


def serve(job: Job, groups: tuple, weights: str) -> None:
    """Train steps on the same groups until the input ends."""
    serving = Serving(job)
    learner = Learner(job.boot(weights))
    serving.ready()
    while serving.wait_for_step():
        serving.begin()
        step = learner.state().step + 1
        while step < DRIFT_STEPS.start:
            step = learner.train(groups, step=step).report.step + 1
        report = learner.train(groups, step=step).report
        assert report.num_updates == 1 and report.kept_fraction == 1.0, f"the learner skipped completions: {report}"
        serving.end(step_s=report.duration_s)


if __name__ == "__main__":
    main()
