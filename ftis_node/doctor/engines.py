"""Checks of the engines and of the libraries that grade answers, each where it runs in a node.

A separate process imports torch and another one vLLM. An import can crash, hang, or leave gigabytes in memory, and an
installed package may be the build for another machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

from ftis_node.doctor.check_result import CheckResult
from ftis_node.doctor.machine import MIN_DRIVER
from ftis_node.errors import INSTALL_VLLM, FtisError
from ftis_node.models.accelerators import Accelerator, unusable_gpu
from ftis_node.tasks import Task, grader_releases, parse_spec
from ftis_node.tasks.problems import Problem
from ftis_node.tasks.scorer import IsolatedScorer

TORCH_LIMIT_S = 45.0
VLLM_LIMIT_S = 75.0
TORCH_PROBE = (
    "import json, torch; c = torch.cuda.is_available(); "
    "print(json.dumps({'version': torch.__version__, 'cuda': torch.version.cuda, 'hip': torch.version.hip, "
    "'has_gpu': c, "
    "'gpus': [torch.cuda.get_device_properties(i).name for i in range(torch.cuda.device_count())] if c else []}))"
)
VLLM_PROBE = "import json, vllm; print(json.dumps({'version': vllm.__version__}))"
NEW_DRIVER = f"install NVIDIA's driver {MIN_DRIVER} or newer: vLLM's torch is built for CUDA 13"
INSTALL_TORCH = "install torch's build for this machine: pip install --force-reinstall torch"
MATH_TASK = "gsm8k"  # `math500` and `dataset:` have the same grader
GENERATED_TASK = "leg_counting"


class ProbeAnswer(NamedTuple):
    """Answer of a probe: facts, or the problem. `was_cut`: the probe exceeded its time limit."""

    facts: dict[str, Any]
    problem: str = ""
    was_cut: bool = False


def check_engines(*, has_gpu: bool) -> Iterator[CheckResult]:
    """Yield the results of torch and vLLM, torch first because vLLM needs it. `has_gpu`: whether there is a GPU."""
    torch = run_probe(TORCH_PROBE, limit_s=TORCH_LIMIT_S)
    yield from torch_results(torch, has_gpu=has_gpu)
    if torch.problem:
        return
    if util.find_spec("vllm") is None:
        yield CheckResult("engine.vllm", "warn", "vLLM is not installed: the torch engine generates", INSTALL_VLLM)
        return
    yield vllm_result(run_probe(VLLM_PROBE, limit_s=VLLM_LIMIT_S), on_gpu=torch.facts["has_gpu"])
    if torch.facts["has_gpu"]:
        yield compiler_result()


def torch_results(answer: ProbeAnswer, *, has_gpu: bool) -> Iterator[CheckResult]:
    if answer.was_cut:
        yield _slow_import("torch", answer)
        return
    if answer.problem:
        yield CheckResult("engine.torch", "fail", f"torch cannot be imported: {answer.problem}", INSTALL_TORCH)
        return
    facts = answer.facts
    for name in facts["gpus"] if facts["hip"] else ():
        if problem := unusable_gpu(Accelerator(name, 0, is_amd=True)):
            yield CheckResult("gpu.unusable", "fail", *problem)
    build = f"for CUDA {facts['cuda']}" if facts["cuda"] else "for CPUs"
    sees = f", sees {', '.join(facts['gpus'])}" if facts["gpus"] else ""
    yield CheckResult("engine.torch", "ok", f"torch {facts['version']} {build}{sees}")
    if has_gpu and not facts["has_gpu"]:
        advice = NEW_DRIVER if facts["cuda"] else INSTALL_TORCH
        yield CheckResult("engine.gpu", "fail", f"torch ({build}) cannot use the GPU", advice)


def _slow_import(name: str, answer: ProbeAnswer) -> CheckResult:
    """Return a warning: a slow disk or a busy machine needs no other build."""
    return CheckResult(
        "check.cut", "warn", f"the import of {name}: {answer.problem}", "a disk or machine is slow: run doctor again"
    )


def vllm_result(answer: ProbeAnswer, *, on_gpu: bool) -> CheckResult:
    """Return the result of vLLM's answer. On a CPU the torch engine replaces vLLM; on a GPU the node does not start."""
    if answer.was_cut:
        return _slow_import("vLLM", answer)
    if answer.problem:
        text = f"vLLM is installed but cannot be imported: {answer.problem}"
        if on_gpu:
            return CheckResult(
                "engine.vllm", "fail", f"{text}; the node does not start", f"{INSTALL_VLLM}; or --engine torch"
            )
        return CheckResult("engine.vllm", "warn", f"{text}; the torch engine generates", INSTALL_VLLM)
    return CheckResult("engine.vllm", "ok", f"vLLM {answer.facts['version']} is installed and generates")


def compiler_result() -> CheckResult:
    """Return whether Triton, by which vLLM runs on a GPU, can compile the C file with which it starts its kernels."""
    header = Path(sysconfig.get_path("include", sysconfig.get_default_scheme().replace("local", "prefix")), "Python.h")
    compiler = os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")
    if compiler and header.exists():
        return CheckResult("engine.compiler", "ok", f"{compiler} and {header} are there")
    lacks = "no C compiler" if not compiler else f"no {header}"
    text = f"{lacks}: vLLM does not start on a GPU"
    return CheckResult("engine.compiler", "fail", text, "install gcc and this Python's headers (python3-dev)")


def run_probe(program: str, *, limit_s: float) -> ProbeAnswer:
    """Run Python code that prints one JSON object as its last line. Kill it at the limit."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ProbeAnswer({}, f"no answer within {limit_s:g} s, stopped", was_cut=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        return ProbeAnswer(json.loads(lines[-1]))
    error_lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    how = f"it ended by signal {-done.returncode}" if done.returncode < 0 else f"it ended with {done.returncode}"
    return ProbeAnswer({}, error_lines[-1][:300] if error_lines else how)


def check_graders() -> Iterator[CheckResult]:
    """Yield a result for each library that grades a built-in task. No data set is read."""
    from ftis_node.tasks.dataset_task import DatasetTask
    from ftis_node.tasks.rg import ReasoningGymTask

    for load in (
        partial(DatasetTask, parse_spec(MATH_TASK).parts[0], "train", problems=(Problem("6 * 7 = ?", "42"),)),
        partial(ReasoningGymTask, "train", GENERATED_TASK),
    ):
        try:
            task = load()
            asyncio.run(_check(task))
        except FtisError as error:
            yield CheckResult("grader.broken", "fail", str(error))
        else:
            yield CheckResult("grader.works", "ok", f"{grader_releases(task)}: known answers get the right rewards")


async def _check(task: Task) -> None:
    async with IsolatedScorer(task):
        pass
