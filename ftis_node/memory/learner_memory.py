"""Settings of the two workers, and the learner's memory by part, from a model's shape.

The terms count the tensors of the learner's code and of transformers' Qwen2 layer one by one. Tests compare them with
the tensors of a real model on the CPU. A process' context is a rule of thumb until a GPU has been measured. All sizes
are bytes; per token means per position of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.config.workers import MAX_SERVED_RANK
from ftis_node.generation.engines.core_process import IS_WSL
from ftis_node.generation.engines.vllm_options import DEFAULT_MAX_BATCH, served_rank
from ftis_node.learner.messages import HEAD_CHUNK_TOKENS
from ftis_node.memory.machine import DEVICE_CONTEXT_BYTES, transfer_of
from ftis_node.models import ModelShape
from ftis_node.models.quantized import BYTES as QUANTIZED_BYTES
from ftis_node.telemetry.terminal_text import MIB

FLOAT32, BFLOAT16 = 4, 2  # bytes of an element
ADAM_BYTES, ADAM_8BIT_BYTES = 8, 2 + 8 / 256  # a trained weight's two moments; of 8 bits with a scale per 256
GPU_HEAD_CHUNK_TOKENS = 2048  # that go through the output head at once, at most
GPU_MICRO_BATCH_TOKENS, CPU_MICRO_BATCH_TOKENS = 16384, 2048
OTHER_BASES = frozenset({"quantization", "cpu_offload_gb", "enable_cumem_allocator"})  # of vLLM: no base to map

# Float32 logits: all operations on them are in place.
LOGITS_BYTES = 4
PLACES_BYTES = 24  # of a token: its id, its position, and its predicting position, in int64
# Resident memory of a Python process that has imported torch, transformers and peft (456 MiB seen, torch 2.13).
HOST_PROCESS_BYTES = 512 * MIB


@dataclass(frozen=True, slots=True)
class Workload:
    """Settings of the two workers that determine memory. `dtype_bytes` is the compute dtype's; `adapter_rank` matters
    with `lora`.

    With `recompute_activations` the last `layers_kept` layers keep their activations nevertheless.
    `holds_start`: the learner also holds the initial model (`policy_loading.load_reference`). `maps_weights`: an engine
    on the learner's GPU reads new weights in place. `maps_base`: both workers compute from the mapped file of an
    adapter's base, if its type is theirs (`shares_base`). `maps_engine`: a learner on vLLM's GPU can compute from the
    base that the engine holds, in 16 or 32 bits (`learner/model/engine_base.py`). `is_quantized`: the base has 4 bits
    (`quantized.py`); `can_quantize`: no other setting excludes that. `context_bytes` are those of each process on a
    GPU.
    """

    dtype_bytes: int
    lora: bool
    adapter_rank: int
    micro_batch_tokens: int
    recompute_activations: bool
    max_batch: int
    max_prompt_tokens: int
    max_total_tokens: int
    group_size: int
    num_groups: int
    own_groups: int
    on_gpu: bool
    can_sleep: bool
    must_sleep: bool = False
    optimizer_states: Literal["float32", "8bit", "offload"] = "float32"
    holds_start: bool = False
    learner_ranks: int = 1
    serves_adapters: bool = False
    maps_weights: bool = False
    maps_base: bool = False
    maps_engine: bool = False
    is_quantized: bool = False
    can_quantize: bool = True
    head_chunk_tokens: int = HEAD_CHUNK_TOKENS
    layers_kept: int = 0
    context_bytes: int = DEVICE_CONTEXT_BYTES

    @classmethod
    def of(cls, settings: NodeSettings, manifest: RunManifest, *, on_gpu: bool) -> Workload:
        """Return the workload of a node with these settings and this run; dtype "auto" is bfloat16 on a GPU only."""
        can_sleep = on_gpu and settings.engine != "torch" and settings.memory.placement != "shared"
        is_bfloat16 = settings.dtype == "bfloat16" or (settings.dtype == "auto" and on_gpu)
        serves_adapters = on_gpu and settings.engine != "torch" and settings.generation.adapters != "merge"
        is_plain = not OTHER_BASES & settings.generation.engine_options.keys()
        return cls(
            dtype_bytes=BFLOAT16 if is_bfloat16 else FLOAT32,
            lora=bool(settings.lora),
            adapter_rank=settings.lora_adapter.rank,
            micro_batch_tokens=micro_batch_tokens_of(settings, on_gpu=on_gpu),
            recompute_activations=recomputes(settings, on_gpu=on_gpu),
            max_batch=settings.generation.max_batch or DEFAULT_MAX_BATCH,  # vLLM's default; torch's is half of it
            max_prompt_tokens=manifest.sampling.max_prompt_tokens,
            max_total_tokens=manifest.sampling.max_total_tokens,
            group_size=manifest.sampling.group_size,
            num_groups=manifest.step.own_groups + manifest.step.foreign_groups,
            own_groups=manifest.step.num_generated,
            on_gpu=on_gpu,
            can_sleep=can_sleep,
            must_sleep=can_sleep and settings.memory.placement == "time_shared",
            learner_ranks=settings.learner.num_ranks if on_gpu else 1,
            optimizer_states=settings.learner.optimizer_states,
            holds_start=manifest.optimizer.kl_coef > 0 and not settings.lora,
            serves_adapters=serves_adapters,
            maps_weights=transfer_of(settings, on_gpu=on_gpu, shares_gpu=True, serves_adapters=False) == "ipc",
            maps_base=not on_gpu and settings.engine == "torch" and settings.generation.adapters == "serve",
            maps_engine=serves_adapters and is_plain and not IS_WSL,
            is_quantized=settings.is_quantized,
            can_quantize=not settings.problem_with_quantize and settings.learner.num_ranks == 1,
        )

    @property
    def lora_rank(self) -> int | None:
        """Rank of the adapter; None if all weights are trained."""
        return self.adapter_rank if self.lora else None

    @property
    def adapter_served(self) -> int | None:
        """The rank that the engine reserves memory for; None if it loads whole models."""
        serves = self.lora and self.serves_adapters and self.adapter_rank <= MAX_SERVED_RANK
        return served_rank(self.adapter_rank) if serves else None

    @property
    def largest_micro_batch(self) -> int:
        """Positions of the largest micro-batch: the setting, at least one completion, at most the whole batch."""
        whole_batch = self.num_groups * self.group_size * self.max_total_tokens
        return min(max(self.micro_batch_tokens, self.max_total_tokens), whole_batch)


def micro_batch_tokens_of(settings: NodeSettings, *, on_gpu: bool) -> int:
    """Return the positions of a micro-batch: the setting, else the number that saturates the device."""
    return settings.learner.micro_batch_tokens or (GPU_MICRO_BATCH_TOKENS if on_gpu else CPU_MICRO_BATCH_TOKENS)


def recomputes(settings: NodeSettings, *, on_gpu: bool) -> bool:
    """Return whether the learner recomputes activations without a plan: the setting, else true on a GPU."""
    chosen = settings.learner.recompute_activations
    return on_gpu if chosen is None else chosen


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """Memory of the learner worker. The parts from `gradients` to `work` exist together only at the step's peak.

    `masters` are those of weights in bfloat16; a float32 weight needs none. `on_host` is in host memory although the
    learner is on a GPU.
    """

    weights: int
    start: int
    masters: int
    moments: int
    context: int
    gradients: int
    activations: int
    work: int
    weight_sync: int
    on_host: int

    @property
    def resident(self) -> int:
        """Bytes between two steps."""
        return self.weights + self.start + self.masters + self.moments + self.context

    @property
    def peak(self) -> int:
        """Largest bytes in a step. Weights are synced after it, when the step's own parts are freed."""
        step = self.gradients + self.activations + self.work
        return self.resident + max(step, self.weight_sync)


def learner_memory(shape: ModelShape, workload: Workload) -> LearnerMemory:
    """Return the learner's memory at the largest point of a step (`_step_parts`), in bytes by part."""
    rank = workload.lora_rank
    trained = shape.num_parameters if rank is None else shape.adapter_parameters(rank)
    frozen = 0 if rank is None or shares_base(shape, workload) else base_bytes(shape, workload)
    is_offloaded = workload.optimizer_states == "offload"
    masters = FLOAT32 * trained if workload.dtype_bytes == BFLOAT16 or is_offloaded else 0
    moments = int((ADAM_8BIT_BYTES if workload.optimizer_states == "8bit" else ADAM_BYTES) * trained)
    gradients = FLOAT32 * trained
    activations, work = max(_step_parts(shape, workload), key=sum)
    return LearnerMemory(
        weights=workload.dtype_bytes * trained + frozen,
        start=workload.dtype_bytes * shape.num_parameters if workload.holds_start else 0,
        masters=0 if is_offloaded else masters,
        moments=0 if is_offloaded else moments,
        context=workload.context_bytes if workload.on_gpu else HOST_PROCESS_BYTES,
        gradients=0 if is_offloaded else gradients,
        activations=activations,
        work=work + dequantized_bytes(shape, workload),
        weight_sync=_weight_sync(shape, workload),
        on_host=masters + moments + gradients if is_offloaded else 0,
    )


def base_bytes(shape: ModelShape, workload: Workload) -> int:
    """Return the bytes of the model without an adapter: in the dtype, or with the layers' linear maps in 4 bits."""
    maps = quantized_weights(shape, workload)
    return workload.dtype_bytes * (shape.num_parameters - maps) + ceil(QUANTIZED_BYTES * maps)


def quantized_weights(shape: ModelShape, workload: Workload) -> int:
    """Return the number of weights in 4 bits."""
    return shape.num_layers * sum(map(prod, shape.linear_layers)) if workload.is_quantized else 0


def dequantized_bytes(shape: ModelShape, workload: Workload) -> int:
    """Return the bytes of the widest map of a base in 4 bits, which a product needs in the dtype for a moment."""
    return workload.dtype_bytes * max(map(prod, shape.linear_layers)) if workload.is_quantized else 0


def shares_base(shape: ModelShape, workload: Workload) -> bool:
    """Return whether the frozen base is in memory once for both workers; the generator's weights are it then."""
    of_file = "BF16" if workload.dtype_bytes == BFLOAT16 else "F32"
    is_mapped = workload.maps_base and not workload.is_quantized
    return workload.lora and is_mapped and shape.stored_as == of_file


def mappable_base(shape: ModelShape, workload: Workload) -> int:
    """Return the bytes of the engine's base that a learner on the same GPU need not hold; 0 if it cannot map them."""
    is_held = workload.maps_engine and workload.adapter_served is not None and workload.learner_ranks == 1
    return 0 if not is_held or workload.is_quantized or shape.experts is not None else base_bytes(shape, workload)


def layer_bytes_per_token(shape: ModelShape, workload: Workload) -> int:
    """Return the bytes that one layer keeps of a token for its backward pass, exact for Qwen2 with fused attention.

    H hidden, Q query, K key, I intermediate sizes, h heads, r rank. Each norm keeps its float32 input and one
    reciprocal, and the normalized value if it is trained. Attention keeps q, k, v, output and a float32 log-sum a head.
    The gated block keeps two wide tensors, three under an adapter (`learner/model/activations.py`).

        float32, full    4 (6 H + 2 Q + 2 K + 2 I + h) + 8
        float32, LoRA    4 (4 H + 2 Q + 2 K + 3 I + 7 r + h) + 8
        bfloat16, full   16 H + 4 Q + 4 K + 4 I + 4 h + 8
        bfloat16, LoRA   12 H + 4 Q + 4 K + 6 I + 14 r + 4 h + 8

    A row of several texts keeps more, which is not counted: a copy of the attention's output. For each text after the
    first it also keeps q, k, v, output and log-sum of the shared prompt. For Qwen2.5-3B at the limits of the preset
    gsm8k-ftis that is a fifth. `SPEED_SHARE` leaves memory free, and a step that does not fit is retried with less.
    """
    hidden, query, key, wide = shape.hidden_size, shape.query_size, shape.kv_size, shape.intermediate_size
    rank = workload.lora_rank or 0
    is_full, is_float32 = workload.lora_rank is None, workload.dtype_bytes == FLOAT32
    norms_and_inputs = {(True, True): 24, (True, False): 16, (False, True): 16, (False, False): 12}[is_float32, is_full]
    widths = 2 * query + 2 * key + (2 if is_full else 3) * wide + 7 * rank
    dense = norms_and_inputs * hidden + workload.dtype_bytes * widths + 4 * shape.num_heads + 8
    return dense + _expert_bytes(shape, workload)


def _expert_bytes(shape: ModelShape, workload: Workload) -> int:
    """Return the bytes that the experts of a layer keep of a token, exact for Qwen3-MoE in transformers.

    Each active expert keeps its input, its output, gate and up together, silu and product; under an adapter neither
    output nor product. It also keeps four indices and a weight. The router keeps a float32 number for each expert. A
    block that all tokens share keeps its output for its own gate.
    """
    if shape.experts is None:
        return 0
    number, per_token, size = shape.experts
    hidden, width, is_full = shape.hidden_size, workload.dtype_bytes, not workload.lora
    kept = 2 * hidden + 4 * size if is_full else hidden + 3 * size
    shared = (hidden if is_full else 0) + 1 if shape.intermediate_size else 0
    return per_token * (width * (kept + 1) + 32) + 4 * number + width * shared


def _step_parts(shape: ModelShape, workload: Workload) -> tuple[tuple[int, int], ...]:
    """Return activations and work space at four points of a step: the end of the forward pass, 3 backward passes.

    These are the backward passes of the output head, of the last layers, and of the embedding. Outside the layers a
    token keeps 12 H bytes (the last norm, and the positions that predict), 8 H in bfloat16. Under LoRA it keeps 4 H or
    2 H. Its rotary angles and places are extra. If layers are recomputed, only their inputs are kept, and the last
    of them recomputes all that it would have kept. The layers after it may keep theirs, which are freed by then.
    """
    tokens, hidden, width = workload.largest_micro_batch, shape.hidden_size, workload.dtype_bytes
    is_full = not workload.lora
    layer = layer_bytes_per_token(shape, workload)
    outside = hidden * ((12 if width == FLOAT32 else 8) if is_full else width)
    places = 2 * width * shape.query_size // shape.num_heads + PLACES_BYTES
    forward_work = _logits(shape, workload)
    embedding = width * shape.embedding_parameters if is_full else 0
    head_gradient = embedding if shape.is_tied else 0  # waits for the embedding's
    last_norm, last_block = (tokens * work + head_gradient for work in _layer_work(shape, workload))
    at_end = tokens * (places + width * hidden), embedding + 2 * head_gradient
    if not workload.recompute_activations:
        kept = tokens * (shape.num_layers * layer + outside + places)
        return (kept, forward_work), (kept, _head_work(shape, workload)), (kept, max(last_norm, last_block)), at_end
    inputs = tokens * ((shape.num_layers - workload.layers_kept) * width * hidden + outside + places)
    kept = inputs + tokens * workload.layers_kept * layer
    # The first norm keeps the layer's input itself where it is float32, so that it is not there twice.
    again = tokens * (layer - (width * hidden if width == FLOAT32 else 0))
    head_work = _head_work(shape, workload)
    last_kept = max(last_norm, last_block) if workload.layers_kept else 0
    return (kept, forward_work), (kept, head_work), (kept, last_kept), (inputs, again + last_block), at_end


def _layer_work(shape: ModelShape, workload: Workload) -> tuple[int, int]:
    """Return the work space of a token in the last norm and the last layer, beyond the kept tensors.

    The norm has gradients of the hidden size. The layer has four tensors of the feed-forward width, three under an
    adapter, when some of the kept tensors are freed. Counted on torch 2.13.
    """
    hidden, width = shape.hidden_size, workload.dtype_bytes
    wide = (4 if not workload.lora else 3) * width * shape.intermediate_size
    if width == FLOAT32:
        return (12 if not workload.lora else 16) * hidden, wide - (8 if not workload.lora else 4) * hidden
    return (16 if not workload.lora else 18) * hidden, wide - (6 if not workload.lora else 4) * hidden


def _head_work(shape: ModelShape, workload: Workload) -> int:
    """Return the work space of the output head's backward pass.

    It has gradients of the positions that predict, one chunk's logits, and, if the head is trained, its float32
    gradient. In bfloat16 a product of the logits is added to the gradient, on a CPU converted to float32 first. A GPU
    with products into float32 makes neither, but others do.
    """
    tokens, width = workload.largest_micro_batch, workload.dtype_bytes
    chunk = min(workload.head_chunk_tokens, tokens) * shape.vocab_size
    positions = width * tokens * shape.hidden_size
    logits = _logits(shape, workload)
    if workload.lora_rank is not None:
        return positions + logits
    converted = 0 if workload.on_gpu else FLOAT32 * shape.embedding_parameters
    product = BFLOAT16 * (chunk + shape.embedding_parameters) + converted if width == BFLOAT16 else 0
    return positions + FLOAT32 * shape.embedding_parameters + max(logits, product)


def _logits(shape: ModelShape, workload: Workload) -> int:
    """Return the bytes of one chunk's logits, in bfloat16 in both forms."""
    chunk = min(workload.head_chunk_tokens, workload.largest_micro_batch) * shape.vocab_size
    return (LOGITS_BYTES + (BFLOAT16 if workload.dtype_bytes == BFLOAT16 else 0)) * chunk


def _weight_sync(shape: ModelShape, workload: Workload) -> int:
    """Return the staging of new weights: on a CPU the whole file, on a GPU one tensor at a time.

    With an adapter to merge, that is three float32 copies of the widest map.
    """
    if not workload.on_gpu:
        is_adapter = workload.lora and (workload.maps_base or workload.is_quantized)
        return workload.dtype_bytes * (
            shape.adapter_parameters(workload.adapter_rank) if is_adapter else shape.num_parameters
        )
    if workload.maps_weights:
        return 0
    if workload.lora_rank is None:
        return shape.largest_tensor * workload.dtype_bytes
    return 3 * FLOAT32 * max(inputs * outputs for inputs, outputs in shape.linear_layers)
