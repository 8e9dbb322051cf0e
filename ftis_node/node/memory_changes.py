"""What would make a model fit: changes in the order in which a person should think of them.

Cheapest in quality first: an adapter, an optimiser of 8 bits, more time for less memory, then smaller pieces, shorter
completions, fewer of them side by side, and last the number format. A change of a number goes down by halves to the
first that fits. Limits of `sampling` belong to the run: changing one makes another swarm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from ftis_node.node.memory_parts import ADAM_8BIT_BYTES, BFLOAT16, FLOAT32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftis_node.node.memory_parts import Workload
    from ftis_node.node.memory_plan import MemoryPlan, Placement

    Place: TypeAlias = Callable[[Workload], MemoryPlan]
    Sizes: TypeAlias = Iterator[tuple[str, Workload]]  # ever smaller, each with the words for it


@dataclass(frozen=True, slots=True)
class Change:
    """What a change would bring; "A + B" are changes together. One that is not `available` cannot be made yet."""

    name: str
    placement: Placement
    peak_bytes: int
    fits: bool
    available: bool = True


def find_changes(workload: Workload, now: MemoryPlan, place: Place) -> Iterator[Change]:
    """Each change alone, if it brings anything; where `now` does not fit and none of them suffices, also as many
    together as it takes, or all of them where even that is too little."""
    alone = [found[0] for sizes in CHANGES if (found := _try(sizes(workload), now.peak_bytes, place))]
    yield from alone
    if now.fits or any(change.fits and change.available for change in alone):
        return
    names: list[str] = []
    together = None
    peak_bytes = now.peak_bytes
    for sizes in CHANGES:
        found = _try(sizes(workload), peak_bytes, place)
        if found is None or not found[0].available:
            continue
        change, workload = found
        peak_bytes = change.peak_bytes
        names.append(change.name)
        together = replace(change, name=" + ".join(names))
        if change.fits:
            break
    if together is not None and len(names) > 1:
        yield together


def _try(sizes: Sizes, peak_bytes: int, place: Place) -> tuple[Change, Workload] | None:
    """The first of the sizes that fits, else the last; None where the peak stays above `peak_bytes` as it was."""
    best: tuple[Change, Workload] | None = None
    for name, changed in sizes:
        made = place(changed)
        available = changed.adam_bytes != ADAM_8BIT_BYTES
        best = Change(name, made.placement, made.peak_bytes, made.fits, available), changed
        if made.fits:
            break
    return best if best is not None and best[0].peak_bytes < peak_bytes else None


def _adapter(workload: Workload) -> Sizes:
    if not workload.lora:
        yield f"--lora (rank {workload.adapter_rank})", replace(workload, lora=True)


def _small_optimiser(workload: Workload) -> Sizes:
    yield "an 8-bit optimiser (not available yet)", replace(workload, adam_bytes=ADAM_8BIT_BYTES)


def _recompute(workload: Workload) -> Sizes:
    if not workload.recompute_activations:
        yield "learner.recompute_activations = true", replace(workload, recompute_activations=True)


def _micro_batch(workload: Workload) -> Sizes:
    tokens = workload.largest_micro_batch
    while tokens > workload.max_total_tokens:
        tokens = max(tokens // 2, workload.max_total_tokens)
        yield f"learner.micro_batch_tokens = {tokens}", replace(workload, micro_batch_tokens=tokens)


def _completions(workload: Workload) -> Sizes:
    prompt, room = workload.max_prompt_tokens, workload.max_total_tokens - workload.max_prompt_tokens
    while room > 1:
        room //= 2
        yield (
            f"sampling.max_total_tokens = {prompt + room} (another run)",
            replace(workload, max_total_tokens=prompt + room),
        )


def _batch(workload: Workload) -> Sizes:
    rows = workload.max_batch
    while rows > workload.group_size:
        rows = max(rows // 2, workload.group_size)
        yield f"generation.max_batch = {rows}", replace(workload, max_batch=rows)


def _bfloat16(workload: Workload) -> Sizes:
    if workload.dtype_bytes == FLOAT32:
        yield "dtype = bfloat16", replace(workload, dtype_bytes=BFLOAT16)


CHANGES = (_adapter, _small_optimiser, _recompute, _micro_batch, _completions, _batch, _bfloat16)
