"""What the cases share: a random model as a learner loads it, and the peak of memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import psutil
import torch

from ftis_node.config.workers import LoraSection
from ftis_node.lab.card.random_model import SHAPES, kept_model
from ftis_node.learner.messages import LearnerBoot
from ftis_node.learner.model.policy import Policy, load_unchecked
from gpu.cases import Options
from process_memory import status_bytes

LOGITS_DEVIATION = 3.0  # standard deviation of a real model's logits; a random one's are near 1
INITIALIZER_RANGE = 0.02


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
    """Return the folder of a random model of `shape` in bfloat16, whose tokenizer has all ids."""
    return kept_model(shape, pads_tokenizer=True, device=device)


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
