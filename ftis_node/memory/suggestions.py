"""Suggestions that make a model fit, in the order in which a person should consider them (`CHANGES`).

A number is halved until the model fits. Limits of `sampling` belong to the run: a change of one makes another swarm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ftis_node.memory.learner_memory import BFLOAT16, FLOAT32, Workload

Place: TypeAlias = Callable[[Workload], "MemorySuggestion"]  # the plan of a workload, without a name
Sizes: TypeAlias = Iterator[tuple[str, Workload]]  # decreasing sizes, each with its text
Kind: TypeAlias = Callable[[Workload], Sizes]


@dataclass(frozen=True, slots=True)
class MemorySuggestion:
    """Effect of a change on the memory plan; "A + B" are several changes together."""

    name: str
    placement: str
    peak_bytes: int
    fits: bool


def suggest_changes(workload: Workload, now: MemorySuggestion, place: Place) -> Iterator[MemorySuggestion]:
    """Return each change that reduces memory alone, and combinations if `now` does not fit and no change suffices.

    A combination has as many changes as it takes, without an adapter and with one, or all if even these do not suffice.
    """
    alone = [found[0] for sizes in CHANGES if (found := _try(sizes(workload), now.peak_bytes, place))]
    yield from alone
    if now.fits or any(change.fits for change in alone):
        return
    both = _together(CHANGES[1:], workload, now, place), _together(CHANGES, workload, now, place)
    yield from {change.name: change for change in both if change is not None}.values()


def _together(
    kinds: Sequence[Kind], workload: Workload, last: MemorySuggestion, place: Place
) -> MemorySuggestion | None:
    """Add one kind of change after the other to `last`, until the model fits; None if there is only one kind."""
    names: list[str] = []
    for sizes in kinds:
        found = _try(sizes(workload), last.peak_bytes, place)
        if found is not None:
            last, workload = found
            names.append(last.name)
            if last.fits:
                break
    return replace(last, name=" + ".join(names)) if len(names) > 1 else None


def _try(sizes: Sizes, peak_bytes: int, place: Place) -> tuple[MemorySuggestion, Workload] | None:
    """Return the first of the sizes that fits, else the last; None if the peak does not fall below `peak_bytes`."""
    best: tuple[MemorySuggestion, Workload] | None = None
    for name, changed in sizes:
        best = replace(place(changed), name=name), changed
        if best[0].fits:
            break
    return best if best is not None and best[0].peak_bytes < peak_bytes else None


def _adapter(workload: Workload) -> Sizes:
    if not workload.lora:
        yield f"--lora (rank {workload.adapter_rank})", replace(workload, lora=True)


def _optimizer_states(workload: Workload) -> Sizes:
    if workload.lora or workload.optimizer_states == "offload":  # an adapter's states are small
        return
    if workload.optimizer_states == "float32":
        yield "learner.optimizer_states = 8bit", replace(workload, optimizer_states="8bit")
    if workload.on_gpu:
        yield "learner.optimizer_states = offload", replace(workload, optimizer_states="offload")


def _recompute(workload: Workload) -> Sizes:
    if not workload.recompute_activations:
        yield "learner.recompute_activations = true", replace(workload, recompute_activations=True)


def _micro_batch(workload: Workload) -> Sizes:
    tokens = workload.largest_micro_batch
    while tokens > workload.max_total_tokens:
        tokens = max(tokens // 2, workload.max_total_tokens)
        yield f"learner.micro_batch_tokens = {tokens}", replace(workload, micro_batch_tokens=tokens)


def _completions(workload: Workload) -> Sizes:
    room = workload.max_total_tokens - workload.max_prompt_tokens
    while room > 1:
        room //= 2
        total = workload.max_prompt_tokens + room
        yield f"sampling.max_total_tokens = {total} (another run)", replace(workload, max_total_tokens=total)


def _batch(workload: Workload) -> Sizes:
    rows = workload.max_batch
    while rows > workload.group_size:
        rows = max(rows // 2, workload.group_size)
        yield f"generation.max_batch = {rows}", replace(workload, max_batch=rows)


def _bfloat16(workload: Workload) -> Sizes:
    if workload.dtype_bytes == FLOAT32:
        yield "dtype = bfloat16", replace(workload, dtype_bytes=BFLOAT16)


CHANGES = (_adapter, _optimizer_states, _recompute, _micro_batch, _completions, _batch, _bfloat16)
