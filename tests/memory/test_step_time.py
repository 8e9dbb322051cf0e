"""The estimate of a step's time: against a count of the operations of each layer, and what it changes in a plan."""

from dataclasses import replace
from math import ceil

import pytest

from ftis_node.memory.generator import generator_memory
from ftis_node.memory.learner_memory import Workload
from ftis_node.memory.machine import Card
from ftis_node.memory.step_time import SPEEDS, generator_seconds, learner_seconds, positions_of, speed_of
from ftis_node.models import published_qwen25
from tests.memory.planning import GIB, RUN, vllm_settings

QWEN = {name.removeprefix("Qwen2.5-"): shape for name, shape in published_qwen25().items()}


def workload(**changes: object) -> Workload:
    settings = vllm_settings(lora=changes.pop("lora", False))
    return replace(Workload.of(settings, RUN, on_gpu=True), **changes)  # type: ignore[arg-type]


def card(name: str) -> Card:
    return Card(SPEEDS[name].gb * GIB, name=f"NVIDIA {name}")


@pytest.mark.parametrize(
    ("model", "lora", "name", "recomputes", "share"),
    [
        ("0.5B", False, "H100", False, 0.35), ("0.5B", False, "H200", False, 0.39),
        ("0.5B", False, "RTX 4090", True, 0.46), ("3B", False, "H100", True, 0.41), ("3B", False, "H200", False, 0.55),
        ("3B", True, "H100", True, 0.32), ("3B", True, "H200", False, 0.47), ("3B", True, "RTX 4090", True, 0.43),
        ("7B", True, "H100", True, 0.40), ("7B", True, "H200", True, 0.43), ("7B", True, "RTX 4090", True, 0.53),
    ],
)  # fmt: skip
def test_a_step_is_within_a_quarter_of_a_count_of_its_operations(model, lora, name, recomputes, share):
    """`share` of the peak: computed for 86,000 positions from the products and bytes of each fused kernel."""
    shape, of_step = QWEN[model], workload(lora=lora, recompute_activations=recomputes)
    assert positions_of(of_step) == pytest.approx(86_000, rel=0.02)
    adapter = shape.adapter_parameters(128) if lora else 0
    operations = positions_of(of_step) * ((4 if lora else 6) * shape.num_parameters + 6 * adapter)
    counted_s = operations / (share * SPEEDS[name].tflops * 1e12)
    assert learner_seconds(shape, of_step, card(name)) == pytest.approx(counted_s, rel=0.25)


def test_options_cost_time_as_they_should():
    shape, here = QWEN["1.5B"], card("RTX 4090")
    plain = learner_seconds(shape, workload(recompute_activations=False), here)
    recomputed = learner_seconds(shape, workload(recompute_activations=True), here)
    assert 1.15 < recomputed / plain < 1.45
    offloaded = learner_seconds(shape, workload(recompute_activations=True, optimizer_states="offload"), here)
    assert 6 < offloaded - recomputed < 12, "about 1 s each micro-batch and 3 s for Adam"
    smaller = learner_seconds(shape, workload(micro_batch_tokens=1024), here)
    assert smaller > learner_seconds(shape, workload(micro_batch_tokens=16384), here)
    two = learner_seconds(shape, workload(learner_ranks=2), here)
    assert two == learner_seconds(shape, workload(), here) / 2


def test_a_smaller_cache_and_turns_cost_generation_time():
    shape, here = QWEN["3B"], card("RTX 4090")
    given = workload(lora=True)
    whole = generator_memory(shape, given)
    roomy = generator_seconds(shape, given, here, cache_bytes=whole.cache)
    tight = generator_seconds(shape, given, here, cache_bytes=whole.smallest_cache)
    assert 2 < tight / roomy < 10
    turns = generator_seconds(shape, given, here, cache_bytes=whole.cache, takes_turns=True)
    assert turns - roomy > 1


def test_expanding_a_4_bit_base_costs_time_and_memory():
    shape, here = QWEN["3B"], card("RTX 4090")
    whole, quantized = workload(lora=True), workload(lora=True, is_quantized=True)
    extra_s = learner_seconds(shape, quantized, here) - learner_seconds(shape, whole, here)
    maps = 36 * (2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 11008)
    assert extra_s == pytest.approx(ceil(positions_of(whole) / 16384) * 3 * maps * 4.5625 / (0.9 * 1008e9), rel=1e-6)

    def token_s(rows, of):
        return generator_seconds(shape, replace(of, max_batch=rows), here, cache_bytes=40 * GIB) * rows

    assert token_s(64, quantized) < token_s(64, whole), "bitsandbytes multiplies with the codes"
    assert token_s(65, quantized) > token_s(65, whole), "it writes and reads a copy of each map"
    expanded = generator_memory(shape, quantized).workspace - generator_memory(shape, whole).workspace
    assert expanded == 2 * 2 * 2048 * 11008, "vLLM joins gate and up"


def test_an_unknown_card_counts_as_one_of_its_size():
    assert speed_of(Card(80 * GIB, name="NVIDIA H100 80GB HBM3")) is SPEEDS["H100"]
    assert speed_of(Card(40 * GIB, name="NVIDIA A100-PCIE-40GB")) is SPEEDS["A100"]
    assert speed_of(Card(48 * GIB, name="NVIDIA L40")) is not SPEEDS["L4"]
    assert speed_of(Card(12 * GIB, name="NVIDIA GeForce RTX 4070 Ti SUPER")) is SPEEDS["RTX 4070 Ti"]
    assert speed_of(Card(int(7.6 * GIB))) is SPEEDS["RTX 4060"]
    assert speed_of(Card(int(22.0 * GIB), name="a card of tomorrow")).gb == 24
