"""Handle of a side's process: it takes a step on command and reports the time.

Sides that alternate step by step run under the same load of the machine. If they do not fit in memory together,
one runs after the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from learner_sides.job import Job

BENCH_DIR = Path(__file__).parent.parent
MODULES = {"ours": "learner_sides.ours", "theirs": "learner_sides.theirs"}
END_WAIT_S = 60


class Side:
    """A side's process, as a context manager. Raises SystemExit with the end of its log if it fails."""

    def __init__(self, kind: str, job: Job) -> None:
        folder = Path(job.folder)
        folder.mkdir(parents=True)
        job_file, self._log = folder / "job.json", folder / "log"
        job_file.write_bytes(msgspec.json.encode(job))
        paths = [str(BENCH_DIR), str(BENCH_DIR.parent), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULES[kind], str(job_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | job.environment(),
        )
        self._kind = kind

    def __enter__(self) -> Side:
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, what: str) -> dict[str, Any]:
        """Send `step` or `peak`, and return the side's figures."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `_answer` raises the cause
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the side '{self._kind}' failed:\n{self._log.read_text()[-4000:]}")
        return json.loads(line)


def take_turns(sides: Mapping[str, tuple[str, Job]], *, steps: int, together: bool) -> dict[str, dict[str, float]]:
    """Return each side's medians over `steps` steps after one that does not count, and its peak memory.

    `sides` maps a name to a kind and its job. `together`: they take turns, in alternating order.
    """
    answers: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    if not together and len(sides) > 1:
        for name, side in sides.items():
            answers |= _all_steps({name: side}, steps)
    else:
        answers = _all_steps(sides, steps)
    return {name: _summary(each) for name, each in answers.items()}


def _all_steps(sides: Mapping[str, tuple[str, Job]], steps: int) -> dict[str, list[dict[str, float]]]:
    with ExitStack() as stack:
        running = {name: stack.enter_context(Side(kind, job)) for name, (kind, job) in sides.items()}
        answers: dict[str, list[dict[str, float]]] = {name: [] for name in running}
        for number in range(steps + 1):
            for name, side in list(running.items())[:: -1 if number % 2 else 1]:
                answers[name].append(side.ask("step"))
                sys.stderr.write(f"  {name}, step {number}: {answers[name][-1]['step_s']:.2f} s\n")
        for name, side in running.items():
            answers[name].append(side.ask("peak"))
    return answers


def _summary(answers: list[dict[str, float]]) -> dict[str, float]:
    *steps, machine = answers
    counted = steps[1:]
    return {
        **{name: median(step[name] for step in counted) for name in ("step_s", "call_s", "cpu_s")},
        "best_step_s": min(step["step_s"] for step in counted),
        "peak_bytes": max(step["peak_bytes"] for step in steps),
        "peak_flops": machine["peak_flops"],
    }
