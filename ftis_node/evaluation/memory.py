"""Whether the models of a mixture fit beside each other, by estimate, before any of them is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from ftis_node.errors import MachineError, ModelError
from ftis_node.models import list_accelerators, parameter_count, pick_device, read_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.models import ModelSource

GIB = 1 << 30
USABLE_SHARE = 0.95  # as the memory plan has it
ROWS = 128  # completions that the engine decodes side by side, divided by the number of models
BYTES = {"cpu": 4, "cuda": 2}  # float32 and bfloat16


def mixture_bytes(sources: Sequence[ModelSource], *, max_tokens: int, bytes_per_number: int) -> int:
    """Weights of all models, and their caches for a full batch of prompts and completions of `max_tokens`."""
    rows = max(1, ROWS // len(sources))
    return sum(
        bytes_per_number * (parameter_count(source) + rows * max_tokens * _cache_numbers(source)) for source in sources
    )


def check_mixture_fits(sources: Sequence[ModelSource], *, max_tokens: int) -> None:
    """Raises MachineError, which says what to do, where they need more memory than is there."""
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
    """What models may take: most of the first GPU, or what is free of the host's memory."""
    if device == "cuda":
        return int(USABLE_SHARE * list_accelerators()[0].memory_bytes)
    return int(psutil.virtual_memory().available)


def _cache_numbers(source: ModelSource) -> int:
    """Numbers that one token takes in the cache; 0 where the model's shape is not one that we know."""
    try:
        shape = read_shape(source)
    except ModelError:
        return 0
    return 2 * shape.num_layers * shape.kv_size
