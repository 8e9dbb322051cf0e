"""Settings on which both workers of a node must agree: dtype, number of threads, and whether to send only adapters."""

from __future__ import annotations

import os
from typing import Any

from ftis_node.config.node import NodeSettings
from ftis_node.config.workers import MAX_SERVED_RANK
from ftis_node.errors import ConfigError
from ftis_node.generation.engines import choose_engine, has_vllm
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
