"""The change of settings that makes a model fit, in the order in which a person should consider them.

A number is halved until the model fits. Limits of `sampling` belong to the run: a change of one makes another swarm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ftis_node.memory.learner_memory import BFLOAT16, Workload


def suggest_change(workload: Workload, excess: Callable[[Workload], int]) -> str:
    """Return the first change with which the model fits; "" if none does.

    `excess` returns the bytes by which a workload's peak is above the usable memory.
    """
    for text, changed in _changes(workload):
        if excess(replace(workload, **changed)) <= 0:
            return text
    return ""


def _changes(workload: Workload) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each change as text, and as the workload's new values."""
    if not workload.lora:  # an adapter's states are small
        yield f"--lora (rank {workload.adapter_rank})", {"lora": True}
        smaller = {"float32": ["8bit", "offload"], "8bit": ["offload"]}.get(workload.optimizer_states, [])
        for states in smaller if workload.on_gpu else smaller[:-1]:  # without a GPU nothing can be offloaded
            yield f"learner.optimizer_states = {states}", {"optimizer_states": states}
    yield "learner.recompute_activations = true", {"recompute_activations": True}
    prompt, total = workload.max_prompt_tokens, workload.max_total_tokens
    for tokens in _halves(workload.largest_micro_batch, total):
        yield f"learner.micro_batch_tokens = {tokens}", {"micro_batch_tokens": tokens}
    for room in _halves(total - prompt, 1):
        yield f"sampling.max_total_tokens = {prompt + room} (another run)", {"max_total_tokens": prompt + room}
    for rows in _halves(workload.max_batch, workload.group_size):
        yield f"generation.max_batch = {rows}", {"max_batch": rows}
    if workload.lora and workload.can_quantize:
        yield "--quantize 4bit", {"is_quantized": True}
    yield "dtype = bfloat16", {"dtype_bytes": BFLOAT16}


def _halves(number: int, least: int) -> Iterator[int]:
    while number > least:
        number = max(number // 2, least)
        yield number
