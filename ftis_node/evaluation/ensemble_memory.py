"""Estimate whether the models of a mixture fit in memory together, before any of them is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from ftis_node.errors import MachineError, ModelError
from ftis_node.models import list_accelerators, parameter_count, pick_device, read_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.models import ModelSource

GIB = 1 << 30
USABLE_SHARE = 0.95  # as in the memory plan
ROWS = 128  # completions that the engine decodes in parallel, divided by the number of models
BYTES = {"cpu": 4, "cuda": 2}  # float32 and bfloat16


def mixture_bytes(sources: Sequence[ModelSource], *, max_tokens: int, bytes_per_number: int) -> int:
    """Return the bytes of all models' weights and of their caches, for a full batch of completions of `max_tokens`."""
    rows = max(1, ROWS // len(sources))
    return sum(
        bytes_per_number * (parameter_count(source) + rows * max_tokens * _cache_numbers(source)) for source in sources
    )


def check_mixture_fits(sources: Sequence[ModelSource], *, max_tokens: int) -> None:
    """Raise MachineError, which says what to do, if they need more memory than is free."""
    device = pick_device("auto")
    needed = mixture_bytes(sources, max_tokens=max_tokens, bytes_per_number=BYTES[device])
    free = free_bytes(device)
    if needed > free:
        raise MachineError(
            f"the {len(sources)} models of the mixture need about {needed / GIB:.1f} GiB together and {free / GIB:.1f} "
            "GiB are there: name fewer or smaller models, take a smaller --max-tokens, or use --mode vote,route, "
            "which load one at a time"
        )


def free_bytes(device: str) -> int:
    """Return the memory that models may use: most of the first GPU, or the free memory of the host."""
    if device == "cuda":
        return int(USABLE_SHARE * list_accelerators()[0].memory_bytes)
    return int(psutil.virtual_memory().available)


def _cache_numbers(source: ModelSource) -> int:
    """Return the numbers in the cache for one token; 0 if the model's shape is unknown."""
    try:
        shape = read_shape(source)
    except ModelError:
        return 0
    return 2 * shape.num_layers * shape.kv_size
