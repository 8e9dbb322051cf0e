"""Memory of the generation worker by part: weights, cache, adapter slots and work space of vLLM.

Also the host memory of all workers beside a GPU.

Workspace, context and graphs are rules of thumb until a GPU has been measured. Bytes everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from ftis_node.generation.engines.base import prefill_tokens_of
from ftis_node.generation.engines.vllm_options import capture_sizes, num_loras
from ftis_node.memory.learner_memory import HOST_PROCESS_BYTES, Workload, base_bytes, dequantized_bytes, learner_memory
from ftis_node.models import ModelShape
from ftis_node.models.quantized import BYTES as QUANTIZED_BYTES
from ftis_node.telemetry.terminal_text import MIB

# Logits in two forms, log-probs, probabilities, and their running sum in float64.
SAMPLING_BYTES = 24
# CUDA graphs that vLLM captures, which it keeps while it sleeps: a fixed part and one of each batch size. With adapters
# it captures them with and without one. Estimates; the default sizes make 0.75 GiB, and 0.5 GiB for adapters.
GRAPHS_BYTES, GRAPH_BYTES = 384 * MIB, 27 * MIB
ADAPTER_GRAPHS_BYTES, ADAPTER_GRAPH_BYTES = 256 * MIB, 18 * MIB
# torch takes smaller tensors from segments of 20 MiB, and each of these has 32 MiB of page-locked memory.
LARGE_BYTES, SMALL_FACTOR = 10 * MIB, 1.6


@dataclass(frozen=True, slots=True)
class GeneratorMemory:
    """Memory of the generation worker. `cache` is for all completions at their limit, `smallest_cache` for one group.

    `adapters` are vLLM's slots for adapters; `adapters_in_turns` is their number if it sleeps in between. `staging` is
    the extra memory for loading new weights, between two steps. `on_host` is in host memory while it sleeps.
    """

    weights: int
    cache: int
    smallest_cache: int
    workspace: int
    asleep: int
    adapters: int = 0
    adapters_in_turns: int = 0
    staging: int = 0
    on_host: int = 0

    @property
    def fixed(self) -> int:
        """Bytes of all parts except the cache and the staging."""
        return self.weights + self.adapters + self.workspace

    @property
    def in_turns(self) -> GeneratorMemory:
        """The same memory if the generator sleeps while the learner steps."""
        return replace(self, adapters=self.adapters_in_turns)


def cache_bytes_per_token(shape: ModelShape, dtype_bytes: int) -> int:
    """Return the bytes of a key and a value for each layer and key/value head."""
    return 2 * shape.num_layers * shape.kv_size * dtype_bytes


def generator_memory(shape: ModelShape, workload: Workload) -> GeneratorMemory:
    """Return the memory of the generator, in bytes by part.

    Workspace has three parts: logits while sampling, one prefill, and context and graphs (on a CPU the process). A
    prefill keeps gate, up and product, and six hidden states of a token; of each active expert also, with two hidden
    states. A 4-bit base expands its widest map for it; vLLM joins gate and up. New weights are staged by module on a
    GPU. The largest is the embedding, the joined gate and up maps, or all experts of a layer. An adapter is loaded into
    its slot.
    """
    width, rank = workload.dtype_bytes, workload.adapter_served
    per_token = cache_bytes_per_token(shape, width)
    sampling = SAMPLING_BYTES * workload.max_batch * shape.vocab_size
    prefill_width = 3 * shape.intermediate_size + 6 * shape.hidden_size
    if shape.experts is not None:
        prefill_width += shape.experts.per_token * (3 * shape.experts.size + 2 * shape.hidden_size)
    prefill = prefill_tokens_of(workload.max_batch) * prefill_width * width
    num_sizes = len(capture_sizes(workload.max_batch))
    graphs = GRAPHS_BYTES + num_sizes * GRAPH_BYTES
    if rank is not None:
        graphs += ADAPTER_GRAPHS_BYTES + num_sizes * ADAPTER_GRAPH_BYTES
    asleep = workload.context_bytes + graphs if workload.on_gpu else HOST_PROCESS_BYTES
    adapter = 0 if rank is None else width * shape.adapter_parameters(rank)
    is_staged = workload.on_gpu and rank is None
    joined = max(2 * shape.hidden_size * shape.intermediate_size, shape.expert_parameters)
    gate_and_up = 2 * width * shape.hidden_size * shape.intermediate_size if workload.is_quantized else 0
    largest_module = max(shape.embedding_parameters, joined)
    return GeneratorMemory(
        weights=base_bytes(shape, workload),
        cache=per_token * workload.max_batch * workload.max_total_tokens,
        smallest_cache=per_token * min(workload.group_size, workload.max_batch) * workload.max_total_tokens,
        workspace=sampling + prefill + asleep + max(gate_and_up, dequantized_bytes(shape, workload)),
        asleep=asleep,
        adapters=num_loras(can_sleep=False) * adapter,
        adapters_in_turns=num_loras(can_sleep=True) * adapter,
        staging=width * largest_module if is_staged else 0,
        on_host=asleep_memory(shape, workload, num_loras(can_sleep=True) * adapter),
    )


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
