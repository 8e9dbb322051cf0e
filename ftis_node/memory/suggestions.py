"""The change of settings that makes a model fit, in the order in which a person should consider them.

A number is halved until the model fits. Limits of `sampling` belong to the run: a change of one makes another swarm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from ftis_node.memory.learner_memory import BFLOAT16, Workload

Sizes: TypeAlias = list[tuple[str, dict[str, Any]]]  # of one kind of change: its text, and the workload's new values


def suggest_change(workload: Workload, excess: Callable[[Workload], int]) -> str:
    """Return the first change with which the model fits, else the first ones that do together; "" if none do.

    `excess` returns the bytes by which a workload's peak is above the usable memory.
    """
    for sizes in _changes(workload):
        for text, changed in sizes:
            if excess(replace(workload, **changed)) <= 0:
                return text
    texts, least = [], excess(workload)
    for kind in range(len(_changes(workload))):
        best: tuple[str, Workload] | None = None
        for text, values in _changes(workload)[kind]:
            changed_workload = replace(workload, **values)
            if (after := excess(changed_workload)) < least:
                least, best = after, (text, changed_workload)
            if least <= 0:
                break
        if best is not None:
            texts.append(best[0])
            workload = best[1]
        if least <= 0:
            return " + ".join(texts)
    return ""


def _changes(workload: Workload) -> tuple[Sizes, ...]:
    states = {"float32": ("8bit", "offload"), "8bit": ("offload",)}.get(workload.optimizer_states, ())
    if workload.lora:  # an adapter's states are small
        states = ()
    prompt, total = workload.max_prompt_tokens, workload.max_total_tokens
    return (
        [(f"--lora (rank {workload.adapter_rank})", {"lora": True})],
        [(f"learner.optimizer_states = {each}", {"optimizer_states": each}) for each in states],
        [("learner.recompute_activations = true", {"recompute_activations": True})],
        [
            (f"learner.micro_batch_tokens = {tokens}", {"micro_batch_tokens": tokens})
            for tokens in _halves(workload.largest_micro_batch, total)
        ],
        [
            (f"sampling.max_total_tokens = {prompt + room} (another run)", {"max_total_tokens": prompt + room})
            for room in _halves(total - prompt, 1)
        ],
        [
            (f"generation.max_batch = {rows}", {"max_batch": rows})
            for rows in _halves(workload.max_batch, workload.group_size)
        ],
        [("--quantize 4bit", {"is_quantized": True})] if workload.lora and workload.can_quantize else [],
        [("dtype = bfloat16", {"dtype_bytes": BFLOAT16})],
    )


def _halves(number: int, least: int) -> Iterator[int]:
    while number > least:
        number = max(number // 2, least)
        yield number
