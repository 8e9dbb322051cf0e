"""Memory, time and rates of the first GPU, or of the CPU if only the program is checked."""

from __future__ import annotations

import math
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from ftis_node.config.workers import LoraSection
from ftis_node.learner.messages import LearnerBoot
from ftis_node.learner.model.policy import Policy, load_unchecked
from gpu.cases import Options
from learner_sides.serving import status_bytes
from stubs.random_models import SHAPES, save_random_model

GIB, MIB = 1 << 30, 1 << 20
MODELS = Path(tempfile.gettempdir()) / "ftis-gpu-check"
LOGITS_DEVIATION = 3.0  # standard deviation of a real model's logits; a random one's are near 1
INITIALIZER_RANGE = 0.02


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: str, *, rounds: int = 1) -> float:
    """Return the seconds of the fastest of `rounds`, after all earlier work of the device."""
    best = math.inf
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best


def used_bytes(device: str, pid: int | None = None) -> int:
    """Return the bytes in use of the GPU, by nvidia-smi, or the resident bytes of process `pid` and its children."""
    if device == "cuda":
        return int(ask_driver("memory.used")) * MIB
    root = psutil.Process(pid)
    return sum(process.memory_info().rss for process in (root, *root.children(recursive=True)))


def ask_driver(field: str) -> str:
    """Return a field of the first GPU by nvidia-smi, which uses no GPU memory. Raises OSError or CalledProcessError."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "--id=0"]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def reset_peak(device: str) -> int:
    """Start a measurement. Return the bytes in use, which `peak_bytes` subtracts on the CPU."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return 0
    Path("/proc/self/clear_refs").write_text("5")
    return int(psutil.Process().memory_info().rss)


def peak_bytes(device: str, before: int) -> tuple[int, int]:
    """Return the peak bytes of tensors and of the allocator since `reset_peak`. On the CPU both are VmHWM's."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return (peak := status_bytes("VmHWM") - before), peak


def model_folder(shape: str, device: str) -> Path:
    """Return the folder of a random model of `shape` in bfloat16. The first case that needs it creates it."""
    folder = MODELS / shape
    if not (folder / "whole").exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_random_model(shape, folder, dtype=torch.bfloat16, pads_tokenizer=True, device=device)
        (folder / "whole").touch()
    return folder


def load_policy(options: Options, shape: str, *, dtype: Any = "bfloat16", lora: LoraSection | None = None) -> Policy:
    """Return the random model of `shape` as a learner loads it."""
    folder = model_folder(shape, options.device)
    boot = LearnerBoot(
        model=str(folder),
        model_name=shape,
        run_id="gpu-check",
        checkpoints_dir=str(folder / "checkpoints"),
        weights_dir=str(folder / "weights"),
        dtype=dtype,
        device=options.device,
        lora=lora,
    )
    return load_unchecked(boot)


def scale_logits(causal_lm: torch.nn.Module, shape: str) -> None:
    """Scale the last norm so that logits deviate by `LOGITS_DEVIATION`: rounding errors grow with logits."""
    width = SHAPES[shape]["hidden_size"]
    with torch.no_grad():
        causal_lm.get_submodule("model.norm").weight.fill_(LOGITS_DEVIATION / (INITIALIZER_RANGE * math.sqrt(width)))


def gib(num_bytes: float) -> float:
    return round(num_bytes / GIB, 3)
