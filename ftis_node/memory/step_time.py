"""The expected time of a training step on GPUs, from shape, cards and options; it compares plans that fit.

A step trains on the groups of this node and its peers, and this node generates its own groups meanwhile. On one GPU
both times add up, on two the longer one counts. The learner's time has four terms:

    products       2 or 3 passes over the weights (LoRA, full), one more with recomputed layers, at `PRODUCT_SHARE`
    elementwise    bytes that norms, rotary angles, SwiGLU and the loss head read and write, at `BANDWIDTH_SHARE`
    update         bytes of the optimizer for each trained weight; through the host's memory with offloaded states
    micro-batches  launches, and gradients that are added to their sums; each pass expands the maps of a 4-bit base

A generated token reads all weights once for the completions of a batch, and the cache of each. For more than
`FUSED_ROWS` completions a 4-bit base is expanded, too. Expect +-25 %, on a 4-bit base more. The constants were fitted
to a count of layer operations, not to measurements (`tests/memory/test_step_time.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ftis_node.memory.generator import cache_bytes_per_token
from ftis_node.memory.learner_memory import Workload, base_bytes, quantized_weights
from ftis_node.memory.machine import Card
from ftis_node.models import ModelShape
from ftis_node.models.quantized import BYTES as QUANTIZED_BYTES

# Expected lengths as parts of a run's limits: by them a step of the paper's run has 86,000 positions.
PROMPT_SHARE, COMPLETION_SHARE = 0.25, 0.38
PRODUCT_SHARE = 0.84  # of the peak of dense bfloat16 products
BANDWIDTH_SHARE = 0.9
HEAD_BYTES = 24  # read and written for each logit by fused code, forward and backward
HIDDEN_BYTES, WIDE_BYTES, ROTARY_BYTES = 60, 5, 21  # of a layer's forward pass: each element of these widths
ADAPTER_BYTES = 5  # of each output of an adapted layer: product with A and B, scale and sum
UPDATE_BYTES, SUM_BYTES = 62, 12  # of each trained weight: clip, Adam and write-back; a micro-batch's gradient
HOST_UPDATE_BYTES, HOST_SUM_BYTES, HOST_GB_S = 44, 15, 25  # the same in host memory of two DDR5 channels
LAUNCH_S = 0.02  # of a micro-batch, on a host of 8 us for each operation
TOKEN_S, ADAPTER_TOKEN_S = 0.004, 0.003  # of vLLM's scheduler for a token of all completions; of its adapters
FUSED_ROWS = 64  # that bitsandbytes multiplies with 4-bit weights directly; 8 to 512, by the card and the map
TURN_S = 1.0  # one sleep and wake, beside the copies


@dataclass(frozen=True, slots=True)
class Speed:
    """Data sheet of a card: memory in GB as sold, and GB/s of that memory.

    `tflops` are of dense bfloat16 products with float32 sums. `link_gb_s` is three quarters of PCIe's nominal rate.
    """

    gb: int
    tflops: float
    gb_s: float
    link_gb_s: float


# NVIDIA's data sheets and architecture papers. The first card of a size is assumed for an unknown one of that size.
SPEEDS = {
    "RTX 4060": Speed(8, 30, 272, 12),
    "RTX 3070": Speed(8, 41, 448, 24),
    "RTX 3080": Speed(10, 60, 760, 24),
    "RTX 3060": Speed(12, 26, 360, 24),
    "RTX 4070 Ti": Speed(12, 80, 504, 24),
    "RTX 5060 Ti": Speed(16, 47, 448, 24),
    "RTX 4080": Speed(16, 97, 717, 24),
    "RTX 4090": Speed(24, 165, 1008, 24),
    "RTX 3090": Speed(24, 71, 936, 24),
    "A10": Speed(24, 125, 600, 24),
    "L4": Speed(24, 121, 300, 24),
    "RTX 5090": Speed(32, 210, 1792, 48),
    "RTX A6000": Speed(48, 155, 768, 24),
    "L40S": Speed(48, 362, 864, 24),
    "H100": Speed(80, 989, 3350, 48),
    "A100": Speed(80, 312, 2039, 24),
    "H200": Speed(141, 989, 4800, 48),
    "B200": Speed(180, 2250, 8000, 48),
}


def speed_of(card: Card) -> Speed:
    """Return the speed of a card by the longest name whose words its own has, else of the next size."""
    named = [name for name in SPEEDS if f" {name} " in f" {card.name} ".replace("-", " ")]
    if named:
        return SPEEDS[max(named, key=len)]
    gb = card.memory_bytes / 1e9
    return min(SPEEDS.values(), key=lambda speed: abs(speed.gb - gb))


def positions_of(workload: Workload) -> float:
    """Return the expected positions that a step computes; each group's prompt counts once."""
    prompt, completion = expected_lengths(workload)
    return workload.num_groups * (prompt + workload.group_size * completion)


def learner_seconds(shape: ModelShape, workload: Workload, card: Card) -> float:
    """Return the learner's expected time of a step on `workload.learner_ranks` cards like `card`."""
    speed, rank = speed_of(card), workload.lora_rank
    flops, bandwidth = PRODUCT_SHARE * speed.tflops * 1e12, BANDWIDTH_SHARE * speed.gb_s * 1e9
    layers = shape.num_parameters - shape.embedding_parameters * (1 if shape.is_tied else 2)
    adapter = 0 if rank is None else shape.adapter_parameters(rank)
    trained = shape.num_parameters if rank is None else adapter
    passes = 3 if rank is None else 2
    again = (1 - workload.layers_kept / shape.num_layers) if workload.recompute_activations else 0
    products = 2 * passes * (layers + shape.embedding_parameters) + 6 * adapter + 2 * again * (layers + adapter)
    rotary = shape.query_size + shape.kv_size
    layer = HIDDEN_BYTES * shape.hidden_size + WIDE_BYTES * shape.intermediate_size + ROTARY_BYTES * rotary
    if rank is not None:
        layer += ADAPTER_BYTES * sum(outputs for _, outputs in shape.linear_layers)
    moved = (3 + again) * shape.num_layers * layer + HEAD_BYTES * shape.vocab_size
    positions = positions_of(workload)
    micro_batches = ceil(positions / workload.largest_micro_batch)
    expanded = (2 + again) * quantized_weights(shape, workload) * (QUANTIZED_BYTES + 2 * workload.dtype_bytes)
    computing = positions * (products / flops + moved / bandwidth)
    computing += micro_batches * (LAUNCH_S + expanded / bandwidth)
    if workload.optimizer_states == "offload":
        link, host = speed.link_gb_s * 1e9, HOST_GB_S * 1e9
        crossing = workload.dtype_bytes * (micro_batches + 1) / link
        update = trained * (crossing + (HOST_UPDATE_BYTES + micro_batches * HOST_SUM_BYTES) / host)
    else:
        update = trained * (UPDATE_BYTES + micro_batches * SUM_BYTES) / bandwidth
    return (computing + update) / workload.learner_ranks


def generator_seconds(
    shape: ModelShape, workload: Workload, card: Card, *, cache_bytes: int, takes_turns: bool = False
) -> float:
    """Return the expected time to generate a step's own groups; `takes_turns` adds the sleep and the last completions.

    A card of several counts as one of their speed together.
    """
    speed = speed_of(card)
    flops = card.number * PRODUCT_SHARE * speed.tflops * 1e12
    bandwidth = card.number * BANDWIDTH_SHARE * speed.gb_s * 1e9
    completions, (prompt, tokens) = workload.own_groups * workload.group_size, expected_lengths(workload)
    of_token = cache_bytes_per_token(shape, workload.dtype_bytes)
    held = of_token * (prompt + tokens / 2)
    batch = max(1.0, min(workload.max_batch, completions, cache_bytes / held))
    weights = base_bytes(shape, workload)
    expanded = 2 * workload.dtype_bytes * quantized_weights(shape, workload) if batch > FUSED_ROWS else 0
    fixed = TOKEN_S + (0 if workload.adapter_served is None else ADAPTER_TOKEN_S) + (weights + expanded) / bandwidth
    seconds = completions * tokens * (fixed / batch + 2 * shape.num_parameters / flops + held / bandwidth)
    if not takes_turns:
        return seconds
    copies = 2 if workload.lora else 0  # new weights of a full training replace the old ones, which are discarded
    longest = workload.max_total_tokens - prompt - tokens
    return seconds + TURN_S + copies * weights / (speed.link_gb_s * 1e9) + longest * fixed


def expected_lengths(workload: Workload) -> tuple[float, float]:
    """Return the expected tokens of a prompt and of a completion."""
    return PROMPT_SHARE * workload.max_prompt_tokens, COMPLETION_SHARE * workload.max_total_tokens
