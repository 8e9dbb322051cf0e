"""What the two workers hold in memory, part by part, from a model's shape and what is asked of it.

Arithmetic alone: nothing is loaded and torch is not imported. The learner's terms count what its code does
(`learner/policy.py`, `learner/logprobs.py`, transformers' eager Qwen2 layer) tensor by tensor; tests compare them with
the tensors of a real model on the CPU. The generator's workspace and the contexts are rules of thumb until a GPU has
been measured. Bytes everywhere; per token means per position of a micro-batch, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from ftis_node.generation.engines.base import DEFAULT_MAX_PREFILL_TOKENS
from ftis_node.generation.engines.vllm_options import DEFAULT_MAX_BATCH

if TYPE_CHECKING:
    from ftis_node.config.manifest import RunManifest
    from ftis_node.config.node import NodeSettings
    from ftis_node.models import ModelShape

MIB = 1 << 20
FLOAT32, BFLOAT16 = 4, 2  # bytes of an element
ADAM_BYTES, ADAM_8BIT_BYTES = 8, 2  # a trained weight's two moments
HEAD_CHUNK_TOKENS = 512  # as in learner.logprobs; a test compares the two

# Float32 logits, their softmax and two products of it live together in the backward pass of log-sum-exp.
LOGITS_BACKWARD_BYTES = 16
LOGITS_FORWARD_BYTES = 8
# Logits in two forms, log-probs, probabilities, and their running sum in float64.
SAMPLING_BYTES = 24
# A process on a GPU: driver context, kernels and cuBLAS workspace; commonly 0.3 to 0.6 GiB.
DEVICE_CONTEXT_BYTES = 512 * MIB
# CUDA graphs that vLLM captures, which it keeps while it sleeps.
ENGINE_GRAPHS_BYTES = 768 * MIB
# Resident memory of a Python process that has imported torch, transformers and peft (456 MiB seen, torch 2.13).
HOST_PROCESS_BYTES = 512 * MIB


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of the two workers. `dtype_bytes` is the compute dtype's; `adapter_rank` matters with `lora`."""

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
    on_gpu: bool
    can_sleep: bool
    must_sleep: bool = False
    adam_bytes: int = ADAM_BYTES

    @classmethod
    def of(cls, settings: NodeSettings, manifest: RunManifest, *, on_gpu: bool) -> Workload:
        """As a node with these settings and this run would have it; dtype "auto" is bfloat16 on a GPU alone."""
        can_sleep = on_gpu and settings.engine != "torch" and settings.memory.placement != "split"
        is_bfloat16 = settings.dtype == "bfloat16" or (settings.dtype == "auto" and on_gpu)
        return cls(
            dtype_bytes=BFLOAT16 if is_bfloat16 else FLOAT32,
            lora=settings.lora,
            adapter_rank=settings.lora_adapter.rank,
            micro_batch_tokens=settings.learner.micro_batch_tokens,
            recompute_activations=recomputes(settings, on_gpu=on_gpu),
            max_batch=settings.generation.max_batch or DEFAULT_MAX_BATCH,  # vLLM's; torch has half of it
            max_prompt_tokens=manifest.sampling.max_prompt_tokens,
            max_total_tokens=manifest.sampling.max_total_tokens,
            group_size=manifest.sampling.group_size,
            num_groups=manifest.step.own_groups + manifest.step.foreign_groups,
            on_gpu=on_gpu,
            can_sleep=can_sleep,
            must_sleep=can_sleep and settings.memory.placement == "sleep",
        )

    @property
    def lora_rank(self) -> int | None:
        """None: all weights are trained."""
        return self.adapter_rank if self.lora else None

    @property
    def largest_micro_batch(self) -> int:
        """Positions: the setting, at least one whole completion, at most the whole batch."""
        whole_batch = self.num_groups * self.group_size * self.max_total_tokens
        return min(max(self.micro_batch_tokens, self.max_total_tokens), whole_batch)


def recomputes(settings: NodeSettings, *, on_gpu: bool) -> bool:
    """Whether the learner recomputes activations: as set, else on a GPU, where they are most of the memory."""
    chosen = settings.learner.recompute_activations
    return on_gpu if chosen is None else chosen


@dataclass(frozen=True, slots=True)
class GeneratorMemory:
    """Of the generation worker. `cache` is for all completions at their limit, `smallest_cache` for one group."""

    weights: int
    cache: int
    smallest_cache: int
    workspace: int
    asleep: int

    @property
    def fixed(self) -> int:
        """All but the cache."""
        return self.weights + self.workspace


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """Of the learner worker. The parts from `gradients` to `work` live together at the step's peak alone."""

    weights: int
    moments: int
    context: int
    gradients: int
    casts: int
    activations: int
    work: int
    hand_over: int

    @property
    def resident(self) -> int:
        """What stays between two steps."""
        return self.weights + self.moments + self.context

    @property
    def peak(self) -> int:
        """In a step; new weights are handed over after it, when its own parts are gone."""
        step = self.gradients + self.casts + self.activations + self.work
        return self.resident + max(step, self.hand_over)


def cache_bytes_per_token(shape: ModelShape, dtype_bytes: int) -> int:
    """A key and a value for each layer and key/value head."""
    return 2 * shape.num_layers * shape.kv_size * dtype_bytes


def generator_memory(shape: ModelShape, workload: Workload) -> GeneratorMemory:
    """Weights in the compute dtype; cache by `cache_bytes_per_token` x completions side by side x their limit.

    Workspace: float32 logits while sampling (24 bytes x max_batch x vocabulary), one prefill of 8,192 tokens (6 x
    intermediate + 12 x hidden bytes a token in bfloat16: gate, up and product, and six hidden states), context and
    graphs. On a CPU the process stands in for context and graphs.
    """
    per_token = cache_bytes_per_token(shape, workload.dtype_bytes)
    sampling = SAMPLING_BYTES * workload.max_batch * shape.vocab_size
    prefill_width = 3 * shape.intermediate_size + 6 * shape.hidden_size
    prefill = DEFAULT_MAX_PREFILL_TOKENS * prefill_width * workload.dtype_bytes
    asleep = DEVICE_CONTEXT_BYTES + ENGINE_GRAPHS_BYTES if workload.on_gpu else HOST_PROCESS_BYTES
    return GeneratorMemory(
        weights=shape.num_parameters * workload.dtype_bytes,
        cache=per_token * workload.max_batch * workload.max_total_tokens,
        smallest_cache=per_token * min(workload.group_size, workload.max_batch) * workload.max_total_tokens,
        workspace=sampling + prefill + asleep,
        asleep=asleep,
    )


def learner_memory(shape: ModelShape, workload: Workload) -> LearnerMemory:
    """Float32 masters, gradients (4 bytes) and Adam's two moments (8) of what is trained, and what one step adds.

    With LoRA the frozen model is held in the compute dtype, the adapter in float32. Autocast keeps a bfloat16 copy of
    every float32 weight that a matrix product uses: through the forward pass always, and through the backward pass
    too unless layers are recomputed. The peak is the largest of three moments (`_step_parts`).
    """
    rank = workload.lora_rank
    trained = shape.num_parameters if rank is None else shape.adapter_parameters(rank)
    frozen = 0 if rank is None else shape.num_parameters
    casts, activations, work = max(_step_parts(shape, workload), key=sum)
    return LearnerMemory(
        weights=FLOAT32 * trained + workload.dtype_bytes * frozen,
        moments=workload.adam_bytes * trained,
        context=DEVICE_CONTEXT_BYTES if workload.on_gpu else HOST_PROCESS_BYTES,
        gradients=FLOAT32 * trained,
        casts=casts,
        activations=activations,
        work=work,
        hand_over=_hand_over(shape, workload),
    )


def layer_bytes_per_token(shape: ModelShape, workload: Workload) -> int:
    """What one layer keeps of a token for its backward pass, exact for the Qwen2 layer with fused attention.

    H hidden, Q query, K key, I intermediate sizes, h heads, r rank. Each norm keeps its float32 input (and, where it is
    trained, the normalised value) and one reciprocal; attention keeps q, k, v, output and a float32 log-sum a head.

        float32, full    4 (6 H + 2 Q + 2 K + 4 I + h) + 8
        float32, LoRA    4 (4 H + 2 Q + 2 K + 4 I + 7 r + h) + 8
        bfloat16, full   26 H + 4 Q + 4 K + 8 I + 4 h + 8
        bfloat16, LoRA   18 H + 6 Q + 4 K + 8 I + 14 r + 4 h + 8

    In bfloat16 each of the five linear maps on a hidden state keeps a cast of its own: 10 of the H.
    """
    hidden, query, key, wide = shape.hidden_size, shape.query_size, shape.kv_size, shape.intermediate_size
    rank = workload.lora_rank or 0
    always = 4 * shape.num_heads + 8
    if workload.dtype_bytes == FLOAT32:
        norms_and_inputs = 6 if workload.lora_rank is None else 4
        return 4 * (norms_and_inputs * hidden + 2 * query + 2 * key + 4 * wide + 7 * rank) + always
    if workload.lora_rank is None:
        return 26 * hidden + 4 * query + 4 * key + 8 * wide + always
    return 18 * hidden + 6 * query + 4 * key + 8 * wide + 14 * rank + always


def _step_parts(shape: ModelShape, workload: Workload) -> tuple[tuple[int, int, int], ...]:
    """Casts, activations and work space at three moments: end of the forward pass, the head's and the last layer's
    backward pass.

    Outside the layers a token keeps 12 H bytes (the last norm and the positions that predict), 4 H under LoRA. A
    layer's backward pass needs two gradients of the feed-forward width in float32 or three in bfloat16, and 14 H bytes
    of hidden states (18 H under LoRA in bfloat16): counted on torch 2.13. Where layers are recomputed, that pass holds
    the layers' inputs, all that its own layer keeps, and nothing from outside.
    """
    tokens, hidden = workload.largest_micro_batch, shape.hidden_size
    is_full, is_float32 = not workload.lora, workload.dtype_bytes == FLOAT32
    layer = layer_bytes_per_token(shape, workload)
    layer_input = hidden * (FLOAT32 if is_full or is_float32 else BFLOAT16)
    outside = hidden * (12 if is_full else 4)
    layer_work = (8 if is_float32 else 6) * shape.intermediate_size + (14 if is_full or is_float32 else 18) * hidden
    forward_work = LOGITS_FORWARD_BYTES * min(HEAD_CHUNK_TOKENS, tokens) * shape.vocab_size
    head_work = _head_work(shape, workload)
    casts, head_casts, layer_casts = _casts(shape, workload)
    if not workload.recompute_activations:
        kept = tokens * (shape.num_layers * layer + outside)
        return (casts, kept, forward_work), (casts, kept, head_work), (casts, kept, tokens * layer_work)
    inputs = shape.num_layers * layer_input
    kept = tokens * (inputs + outside)
    # The first norm keeps the layer's input itself where it is float32, so that it is not there twice.
    again = layer - (layer_input if is_full or is_float32 else 0)
    at_layer = (layer_casts, tokens * inputs, tokens * (again + layer_work))
    return (casts, kept, forward_work), (head_casts, kept, head_work), at_layer


def _head_work(shape: ModelShape, workload: Workload) -> int:
    """Of the output head's backward pass: logits of one chunk beside the head's gradient so far, or, at its end, that
    gradient in its forms (bfloat16 and float32; of a tied head in float32, three times). A frozen head has none."""
    tokens = min(HEAD_CHUNK_TOKENS, workload.largest_micro_batch)
    logits = LOGITS_BACKWARD_BYTES * tokens * shape.vocab_size
    if workload.lora_rank is not None:
        return logits
    at_end = BFLOAT16 + FLOAT32 if workload.dtype_bytes == BFLOAT16 else 3 * FLOAT32
    return max(logits + workload.dtype_bytes * shape.embedding_parameters, at_end * shape.embedding_parameters)


def _casts(shape: ModelShape, workload: Workload) -> tuple[int, int, int]:
    """Bfloat16 copies of float32 weights: all, the head's, one layer's. An embedding is looked up, never cast."""
    if workload.dtype_bytes == FLOAT32:
        return 0, 0, 0
    if workload.lora_rank is not None:
        adapter = BFLOAT16 * shape.adapter_parameters(workload.lora_rank)
        return adapter, 0, ceil(adapter / shape.num_layers)
    head = BFLOAT16 * shape.embedding_parameters
    everything = BFLOAT16 * shape.num_parameters - (0 if shape.is_tied else head)
    return everything, head, ceil((everything - head) / shape.num_layers)


def _hand_over(shape: ModelShape, workload: Workload) -> int:
    """Staging of new weights: on a CPU the whole file's bytes; on a GPU one tensor at a time, the embedding in the
    compute dtype or, with an adapter to be merged, three float32 copies of the widest map."""
    if not workload.on_gpu:
        return shape.num_parameters * workload.dtype_bytes
    if workload.lora_rank is None:
        return shape.embedding_parameters * workload.dtype_bytes
    return 3 * FLOAT32 * max(inputs * outputs for inputs, outputs in shape.linear_layers)
