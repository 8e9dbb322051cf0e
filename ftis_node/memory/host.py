"""Host memory of the workers beside a GPU, and of an engine that sleeps. Bytes everywhere."""

from __future__ import annotations

from math import ceil

from ftis_node.memory.learner_memory import HOST_PROCESS_BYTES, MIB, Workload, base_bytes, learner_memory
from ftis_node.models import ModelShape
from ftis_node.models.quantized import BYTES as QUANTIZED_BYTES

# torch takes smaller tensors from segments of 20 MiB, and each of these has 32 MiB of page-locked memory.
LARGE_BYTES, SMALL_FACTOR = 10 * MIB, 1.6


def host_memory(shape: ModelShape, workload: Workload) -> int:
    """Return the host memory beside a GPU: processes, offloaded states, and the largest of three transient uses.

    The transient uses are a weight sync, a checkpoint's Adam moments, and the start of several ranks. Then rank 0 holds
    the model, and each rank one tensor of it. A served adapter is smaller than its moments.
    """
    weights = base_bytes(shape, workload)
    learner = learner_memory(shape, workload)
    read = weights + workload.learner_ranks * workload.dtype_bytes * shape.largest_tensor
    crossing = 0 if workload.maps_weights or workload.adapter_served is not None else weights
    saved = max(crossing, learner.moments, learner.on_host // 2, read if workload.learner_ranks > 1 else 0)
    return (2 + workload.learner_ranks) * HOST_PROCESS_BYTES + learner.on_host + saved


def asleep_memory(shape: ModelShape, workload: Workload, adapters: int) -> int:
    """Return the host memory of an engine that sleeps with its weights: 1.2 to 1.9 times their bytes.

    vLLM joins q, k, v, and gate, up, and the experts' maps. It copies each tensor into page-locked memory, of which
    torch allocates powers of two (`roundSize` in CachingHostAllocator.h). `adapters` are bytes in small tensors.
    """
    hidden, query, wide, experts = shape.hidden_size, shape.query_size, shape.intermediate_size, shape.expert_parameters
    attention, block = (hidden * (query + 2 * shape.kv_size), query * hidden), (2 * hidden * wide, hidden * wide)
    width = QUANTIZED_BYTES if workload.is_quantized else workload.dtype_bytes
    layer = sum(_page_locked(ceil(width * size)) for size in (*attention, *block, 2 * experts // 3, experts // 3))
    outside = (1 if shape.is_tied else 2) * _page_locked(workload.dtype_bytes * shape.embedding_parameters)
    return shape.num_layers * layer + outside + ceil(SMALL_FACTOR * adapters)


def _page_locked(num_bytes: int) -> int:
    return ceil(SMALL_FACTOR * num_bytes) if num_bytes < LARGE_BYTES else 1 << (num_bytes - 1).bit_length()
