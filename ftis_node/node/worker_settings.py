"""What both workers of a node must agree on: dtype, number of threads, whether to send only adapters, and log-probs.

A warning comes when the log-prob mismatch between engine and learner passes its limits, by dtype:

    dtype      max_kl  max_share
    float32    1e-4    0.01       two float32 passes on a CPU differ by a KL of 1e-13, and no token is off by 1 %
    bfloat16   2e-3    0.9        rounding alone moves a log-prob by 0.003 to 0.013 nats on average, measured on tiny
                                  models: a KL of 1e-5 to 1.3e-4, and 5 to 55 % of tokens off by more than 1 %.
                                  For a 3B model, 0.03 to 0.04 nats: a KL of 5e-4 to 6e-4, 73 to 86 % of tokens, on
                                  64 to 128 tokens

The KL is half the mean square of the log-ratios. A KL of 1e-4 means importance ratios off by 1.4 %, 2e-3 by 6 %.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ftis_node.config.node import NodeSettings
from ftis_node.config.workers import MAX_SERVED_RANK
from ftis_node.errors import ConfigError
from ftis_node.generation.engines import choose_engine, has_vllm
from ftis_node.learner.messages import StepReport
from ftis_node.models import pick_device


def serves_adapters(settings: NodeSettings) -> bool:
    """Return whether the engine gets only adapters. On a CPU this requires a setting, since generation is slower; with
    a quantized base it is always so.

    Raise EngineError if the setting requires adapters, the engine is not torch, and vLLM is missing. Raise ConfigError
    if they must be served and their rank, which may be that of `--model` or of the home, is too large.
    """
    mode = settings.generation.adapters
    rank = settings.lora_adapter.rank
    if rank > MAX_SERVED_RANK and (settings.is_quantized or (settings.lora and mode == "serve")):
        remove = "--quantize 4bit" if settings.is_quantized else "generation.adapters = 'serve'"
        raise ConfigError(f"the adapter has rank {rank}, and engines serve up to {MAX_SERVED_RANK}: remove {remove}")
    if settings.is_quantized:
        return True
    if not settings.lora or mode == "merge":
        return False
    if not settings.generates or settings.engine == "torch":
        return mode == "serve"  # "serve" is the operator's statement that all generators can serve adapters
    if mode == "serve":
        choose_engine("vllm")
        return True
    return pick_device(settings.device) != "cpu" and has_vllm() and rank <= MAX_SERVED_RANK


def dtype_of(settings: NodeSettings) -> Any:
    """Return the dtype of the weights: the setting, else float32 on a CPU and bfloat16 on a GPU."""
    if settings.dtype != "auto":
        return settings.dtype
    return "float32" if pick_device(settings.device) == "cpu" else "bfloat16"


def threads_of(num_threads: int, *, num_processes: int = 1) -> int:
    """Return the number of threads for each process of a worker. The two workers share the cores."""
    return num_threads or max(1, (os.cpu_count() or 2) // 2 // num_processes)


@dataclass(frozen=True, slots=True)
class MismatchLimits:
    """Upper limits: KL in nats per token, and the share of tokens whose importance ratio is off by more than 1 %."""

    max_kl: float
    max_share: float


LIMITS = {"float32": MismatchLimits(1e-4, 0.01), "bfloat16": MismatchLimits(2e-3, 0.9)}


def warning_of(report: StepReport, limits: MismatchLimits) -> str:
    """Return a line that explains a mismatch above its limits and gives a remedy."""
    return (
        f"engine and learner disagree about version {report.mismatch_version}: KL {report.mismatch_kl:.2g} "
        f"(limit {limits.max_kl:.2g}), {report.mismatch_share:.1%} of {report.mismatch_tokens} tokens off by more than "
        f"1 % (limit {limits.max_share:.0%}). Every importance ratio has this error. Remove quantisation and other "
        "engine options that change log-probs, or set dtype = float32. With vLLM, --engine torch is another way."
    )
