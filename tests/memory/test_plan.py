"""The placement of workers by model and card, and the changes that the plan suggests if they do not fit."""

from dataclasses import replace
from math import ceil
from typing import Any

import pytest

from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.errors import MachineError
from ftis_node.memory import learner_memory as module
from ftis_node.memory.generator import generator_memory
from ftis_node.memory.learner_memory import HOST_PROCESS_BYTES, Workload, layer_bytes_per_token, learner_memory
from ftis_node.memory.machine import DEVICE_CONTEXT_BYTES, USABLE_SHARE, Card, Machine
from ftis_node.memory.placement import place_workers_on
from ftis_node.memory.plan import BASE, SHARED_BASE, SPEED_SHARE, WEIGHT_SYNC, MemoryPlan, plan
from ftis_node.memory.suggestions import suggest_change
from ftis_node.models import ModelShape, published_qwen25
from ftis_node.models.shape import Experts
from tests.memory.planning import GIB, HALF_B, RUN, THREE_B, machine

SEVEN_B = published_qwen25()["Qwen2.5-7B"]


def settings(**changes: Any) -> NodeSettings:
    """Return settings with 128 concurrent completions and kept activations, updated by `changes`."""
    plain = {"generation": {"max_batch": 128}, "learner": {"recompute_activations": False}}
    merged = {name: plain.get(name, {}) | changes.get(name, {}) for name in plain}
    return NodeSettings.model_validate({"model": "x"} | changes | merged)


def planned(
    shape: ModelShape, *gpus_gib: float, run: RunManifest = RUN, host_gib: float = 64, **changes: Any
) -> MemoryPlan:
    return plan(shape, machine(*gpus_gib, host_gib=host_gib), settings(**changes), run)


def small_steps(**changes: Any) -> dict[str, Any]:
    return {"learner": {"micro_batch_tokens": 4096}} | changes


@pytest.mark.parametrize(
    ("shape", "gpus_gib", "changes", "placement"),
    [
        (HALF_B, (24,), small_steps(), "shared"),
        (HALF_B, (24,), {"learner": {"recompute_activations": None}}, "shared"),  # unset: recomputed on a GPU
        (HALF_B, (24,), {}, "does_not_fit"),  # 16,384 tokens of activations alone take 24 GiB
        (THREE_B, (24,), small_steps(), "does_not_fit"),
        (THREE_B, (24,), {"lora": True, "learner": {"recompute_activations": True}}, "time_shared"),
        (THREE_B, (72,), small_steps(), "time_shared"),
        (THREE_B, (94,), small_steps(), "shared"),
        (THREE_B, (80, 80), small_steps(), "dedicated"),
        (THREE_B, (80, 24), small_steps(), "does_not_fit"),
    ],
)
def test_the_placement_of_published_models(shape, gpus_gib, changes, placement):
    made = planned(shape, *gpus_gib, **changes)
    assert made.placement == placement
    assert made.fits is (placement != "does_not_fit") is (made.peak_bytes <= made.usable_bytes)


@pytest.mark.parametrize(
    ("shape", "gib", "recomputes", "chunk"),
    [
        (HALF_B, 24, True, 2048),
        (HALF_B, 32, True, 2048),  # kept activations would fill the card
        (HALF_B, 80, False, 2048),
        (THREE_B, 80, True, 2048),
        (THREE_B, 139, False, 2048),
    ],
)
def test_activations_are_kept_if_the_card_has_free_memory(shape, gib, recomputes, chunk):
    unset = {"recompute_activations": None}
    made = planned(shape, gib, learner=unset)
    assert (made.recompute_activations, made.head_chunk_tokens) == (recomputes, chunk)
    least = planned(shape, gib, learner={"recompute_activations": True})
    assert (made.placement, made.kv_cache_bytes) == (least.placement, least.kv_cache_bytes)
    kept = planned(shape, gib, learner={"recompute_activations": False})
    assert made.keeping_bytes is not None
    assert made.keeping_bytes == pytest.approx(kept.peak_bytes, rel=0.05), "they differ by the head's chunks"
    assert (made.keeping_bytes > SPEED_SHARE * made.usable_bytes) is recomputes
    if not recomputes:
        assert made.peak_bytes == kept.peak_bytes <= SPEED_SHARE * made.usable_bytes
    assert least.keeping_bytes is kept.keeping_bytes is None


@pytest.mark.parametrize(("shape", "gib", "lora"), [(HALF_B, 32, False), (THREE_B, 80, True), (THREE_B, 48, True)])
def test_as_many_layers_keep_their_activations_as_the_card_has_memory_for(shape, gib, lora):
    made = planned(shape, gib, lora=lora, learner={"recompute_activations": None})
    all_recomputed = planned(shape, gib, lora=lora, learner={"recompute_activations": True})
    assert 0 < made.layers_kept < made.num_layers == shape.num_layers
    assert f"kept in {made.layers_kept} of {shape.num_layers} layers (in all they need " in made.activations
    assert made.step_s < all_recomputed.step_s
    room = SPEED_SHARE * made.usable_bytes - made.peak_bytes
    workload = Workload.of(settings(lora=lora), RUN, on_gpu=True)
    assert 0 <= room < workload.largest_micro_batch * layer_bytes_per_token(shape, workload)


@pytest.mark.parametrize(("gpus_gib", "placement"), [((22,), "time_shared"), ((11.6, 22), "dedicated")])
def test_a_tenth_of_the_learners_gpu_stays_free_if_the_cache_fills_the_generators(gpus_gib, placement):
    given = {"lora": True, "generation": {"max_batch": 256}, "learner": {"recompute_activations": None}}
    made = planned(THREE_B, *gpus_gib, **given)
    assert (made.placement, made.peak_bytes) == (placement, int(USABLE_SHARE * gpus_gib[0] * GIB))
    workload = Workload.of(settings(**given), RUN, on_gpu=True)
    speed = {"layers_kept": made.layers_kept, "head_chunk_tokens": made.head_chunk_tokens}
    used = learner_memory(THREE_B, replace(workload, **speed)).peak
    if placement == "time_shared":
        used += generator_memory(THREE_B, workload).asleep
    assert made.layers_kept and used <= SPEED_SHARE * int(USABLE_SHARE * gpus_gib[-1] * GIB)


def test_activations_are_not_kept_at_the_cost_of_time_sharing():
    """On 100 GiB a 3B learner with kept activations fits only while the generator sleeps."""
    time_shared = planned(THREE_B, 100, learner={"recompute_activations": False, "micro_batch_tokens": 12288})
    made = planned(THREE_B, 100, learner={"recompute_activations": None, "micro_batch_tokens": 12288})
    assert time_shared.fits
    assert (time_shared.placement, made.placement, made.recompute_activations) == ("time_shared", "shared", True)


def test_the_suggested_change_makes_3b_fit_on_24_gib():
    assert planned(THREE_B, 24, lora=True, learner={"recompute_activations": True}).fits
    assert planned(THREE_B, 24, learner={"recompute_activations": True}).change == "--lora (rank 128)"
    assert planned(THREE_B, 4).change == planned(HALF_B, 80).change == ""


@pytest.mark.parametrize(
    ("saves", "change"),
    [
        (lambda w: w.optimizer_states == "offload", "learner.optimizer_states = offload"),
        (lambda w: w.micro_batch_tokens <= 5000, "learner.micro_batch_tokens = 4096"),
        (lambda w: w.max_total_tokens <= 400, "sampling.max_total_tokens = 388 (another run)"),
        (lambda w: w.max_batch <= 20, "generation.max_batch = 16"),
        (lambda w: w.dtype_bytes == 2, "dtype = bfloat16"),
        (lambda w: False, ""),
    ],
)
def test_the_first_change_that_fits_is_suggested(saves, change):
    workload = replace(Workload.of(settings(dtype="float32"), RUN, on_gpu=True), max_prompt_tokens=16)
    assert suggest_change(workload, lambda changed: 0 if saves(changed) else 1) == change


def test_the_savings_of_8_bit_and_offloaded_states():
    def needs(states):
        made = planned(THREE_B, 80, learner={"optimizer_states": states}, memory={"placement": "shared"})
        learner = learner_memory(THREE_B, Workload.of(settings(learner={"optimizer_states": states}), RUN, on_gpu=True))
        return learner.peak, made.host_bytes

    num = THREE_B.num_parameters
    (plain, host), (small, _), (offloaded, more_host) = needs("float32"), needs("8bit"), needs("offload")
    assert plain - small == pytest.approx((8 - 2 - 1 / 32) * num)
    assert plain - offloaded == (4 + 8 + 4) * num
    assert more_host - host == (4 + 8 + 4) * num  # both also need host memory for a checkpoint


def test_each_further_rank_needs_host_memory_for_its_process_and_one_tensor():
    def host(processes, **changes):
        return planned(SEVEN_B, 80, 80, learner={"processes": processes}, **changes).host_bytes

    assert host(8) - host(1) == 7 * HOST_PROCESS_BYTES
    large = {"lora": True, "lora_adapter": {"rank": 512}, "generation": {"adapters": "merge"}}
    tensors = 16 * 2 * SEVEN_B.embedding_parameters  # each rank holds one while rank 0 broadcasts the model
    assert host(16, **large) - host(1, **large) == 15 * HOST_PROCESS_BYTES + tensors


def test_an_engine_that_sleeps_copies_each_tensor_into_a_power_of_two_of_bytes():
    def host(shape, placement):
        lora = {"lora": True, "learner": {"recompute_activations": None}}
        return planned(shape, 80, host_gib=128, memory={"placement": placement}, **lora).host_bytes

    mib, places = 1 << 20, 2 * 2 * SEVEN_B.adapter_parameters(128)
    # 31.5 MiB of q, k, v; 24.5 of the output; 259 of gate and up; 129.5 of down; 1039.5 of the embedding, of the head
    copies = (28 * (32 + 32 + 512 + 256) + 2 * 2048) * mib + ceil(1.6 * places)
    assert host(SEVEN_B, "time_shared") - host(SEVEN_B, "shared") == copies
    ratios = [
        (host(shape, "time_shared") - host(shape, "shared"))
        / (2 * shape.num_parameters + 4 * shape.adapter_parameters(128))
        for shape in published_qwen25().values()
    ]
    assert 1.2 < min(ratios) < 1.4 and 1.8 < max(ratios) < 1.9


def test_workers_take_turns_only_if_the_host_has_memory_for_the_sleeping_engine():
    given = {"lora": True, "learner": {"recompute_activations": None}, "memory": {"placement": "time_shared"}}
    roomy, poor = planned(THREE_B, 22, **given), planned(THREE_B, 22, host_gib=12, **given)
    assert (roomy.placement, poor.placement, poor.fits) == ("time_shared", "does_not_fit", False)
    assert (poor.peak_bytes, poor.usable_bytes) == (roomy.host_bytes, int(USABLE_SHARE * 12 * GIB))
    line = r"fit in the host's memory: 13.\d\d GiB needed, 11.40 GiB usable \(beside .*\); "
    with pytest.raises(MachineError, match=line) as refused:
        place_workers_on(machine(22, host_gib=12), THREE_B, settings(engine="vllm", **given), RUN)
    assert "\n" not in str(refused.value)


def test_several_ranks_always_recompute_activations():
    """They cannot switch to recomputation after a step has run out of memory."""
    learner = {"recompute_activations": None}
    assert not planned(HALF_B, 141, 141, learner=learner).recompute_activations
    assert planned(HALF_B, 141, 141, 141, learner=learner | {"processes": 2}).recompute_activations


def test_the_parts_of_a_shared_plan_sum_to_the_peak():
    made = planned(HALF_B, 24, **small_steps())
    parts = dict(made.parts)
    assert parts.pop(WEIGHT_SYNC) == 0, "the engine maps the weights"
    assert sum(parts.values()) == made.peak_bytes
    assert made.kv_cache_bytes == 2 * 24 * 128 * 2 * 128 * 760
    share = (parts[BASE] + made.kv_cache_bytes) / (24 * GIB)
    assert made.gpu_memory_utilization is not None
    assert share <= made.gpu_memory_utilization < share + 0.001


@pytest.mark.parametrize(("shape", "gib"), [(HALF_B, 7.6), (THREE_B, 22)])
def test_vllm_demands_no_more_than_is_free_when_its_context_exists(shape, gib):
    """The learner may have loaded its model by then (`request_memory` in vllm/v1/worker/utils.py)."""
    card = Card(int(gib * GIB), taken_bytes=3 * GIB // 10)
    given = settings(lora=True, generation={"max_batch": 256}, learner={"recompute_activations": None})
    made = plan(shape, Machine((card,), 64 * GIB), given, RUN)
    assert made.placement == "time_shared" and made.gpu_memory_utilization is not None
    by_learner = sum(made.parts[f"learner: {part}"] for part in ("weights", "float32 masters", "Adam's moments"))
    free = card.memory_bytes - card.taken_bytes - by_learner - 2 * DEVICE_CONTEXT_BYTES
    assert made.parts[BASE] + made.kv_cache_bytes < made.gpu_memory_utilization * card.memory_bytes <= free


def test_the_peak_of_time_sharing_is_the_larger_of_the_two_workers():
    made = planned(THREE_B, 72, **small_steps())
    workload = Workload.of(settings(**small_steps()), RUN, on_gpu=True)
    generator, learner = generator_memory(THREE_B, workload), learner_memory(THREE_B, workload)
    awake = learner.resident + generator.weights + generator.workspace + made.kv_cache_bytes
    assert made.peak_bytes == max(awake, learner.peak + generator.asleep)
    assert learner.peak + generator.weights + generator.workspace > made.usable_bytes  # both together do not fit


def test_the_cache_shrinks_to_the_free_memory_but_not_below_one_group():
    lora = {"lora": True, "learner": {"recompute_activations": True, "micro_batch_tokens": 4096}}
    unlimited = planned(THREE_B, 80, **lora).kv_cache_bytes
    tight = planned(THREE_B, 25, **lora)
    assert tight.placement == "shared"
    assert unlimited / 2 < tight.kv_cache_bytes < unlimited
    assert tight.peak_bytes == int(USABLE_SHARE * 25 * GIB)
    assert planned(THREE_B, 8, **lora).kv_cache_bytes == 2 * 36 * 256 * 2 * 12 * 760


def test_without_a_gpu_the_plan_is_for_host_memory_in_float32():
    made = planned(HALF_B, host_gib=64, **small_steps())
    assert (made.placement, made.gpu_memory_utilization) == ("cpu", None)
    assert made.parts["generator: weights"] == made.parts["learner: weights"] == 4 * HALF_B.num_parameters
    assert made.parts["learner: float32 masters"] == 0
    assert planned(HALF_B, 80, host_gib=64, device="cpu", **small_steps()) == made
    short = planned(HALF_B, host_gib=16, **small_steps())
    assert short.placement == "does_not_fit"
    assert short.change == "learner.recompute_activations = true"


def test_on_a_cpu_the_base_of_a_served_adapter_counts_once_if_its_file_has_the_nodes_type():
    def made(stored_as, adapters, engine="torch"):
        given = {"lora": True, "engine": engine, "generation": {"adapters": adapters}, **small_steps()}
        return planned(replace(HALF_B, stored_as=stored_as), **given)

    base = 4 * HALF_B.num_parameters
    shared, apart = made("F32", "serve"), made("BF16", "serve")
    assert shared.parts[SHARED_BASE] == base and BASE not in shared.parts
    assert apart.peak_bytes - shared.peak_bytes == base
    assert sum(shared.parts.values()) == shared.peak_bytes
    for other in (made("F32", "merge"), made("F32", "serve", "vllm")):
        assert other.parts[BASE] == base and SHARED_BASE not in other.parts


def test_a_base_on_one_gpu_counts_once_only_if_nothing_fits_with_two_and_the_learner_can_map_it(monkeypatch):
    batches = {"generation": {"max_batch": 32}, "learner": {"micro_batch_tokens": 2048, "recompute_activations": None}}
    small = {"lora": True, "lora_adapter": {"rank": 32, "alpha": 32}, **batches}
    one, two = planned(THREE_B, 12, **small), planned(THREE_B, 18, **small)
    assert (one.placement, one.shares_base, two.fits, two.shares_base) == ("shared", True, True, False)
    parts = one.parts | {WEIGHT_SYNC: 0}
    assert sum(parts.values()) == one.peak_bytes and BASE not in parts
    assert parts[SHARED_BASE] == two.parts[BASE] == 2 * THREE_B.num_parameters
    assert two.parts["learner: weights"] - parts["learner: weights"] == parts[SHARED_BASE]
    of_engine = sum(size for name, size in parts.items() if name.startswith(("generator", "shared")))
    free = one.usable_bytes - of_engine - parts["learner: context"]
    assert one.learner_share is not None and 0 <= free / (12 * GIB) - one.learner_share < 0.001
    for check in ("refuse", "warn"):
        made = place_workers_on(machine(12), THREE_B, settings(engine="vllm", memory={"check": check}, **small), RUN)
        assert (made.shares_base, made.copies_base, made.takes_turns) == (True, check == "warn", False)
        assert made.memory.endswith("by the plan, one base for both workers")
    assert not place_workers_on(machine(18), THREE_B, settings(engine="vllm", **small), RUN).shares_base
    others: list[dict[str, Any]] = [{"engine": "torch"}, {"memory": {"placement": "time_shared"}}]
    engines: list[dict[str, Any]] = [{"adapters": "merge"}, {"engine_options": {"quantization": "fp8"}}]
    others += [{"generation": {"max_batch": 32, **engine}} for engine in engines]
    assert not any(planned(THREE_B, 12, **small | other).fits for other in others)
    assert not planned(replace(THREE_B, experts=Experts(number=8, per_token=2, size=64)), 12, **small).fits
    monkeypatch.setattr(module, "IS_WSL", True)
    assert not planned(THREE_B, 12, **small).fits


def test_on_a_cpu_published_weights_take_memory_only_if_dev_shm_has_space():
    def made(memory_disk_gib):
        node_settings = settings(dtype="bfloat16", lora=True, **small_steps())
        return plan(HALF_B, Machine((), 64 * GIB, int(memory_disk_gib * GIB)), node_settings, RUN)

    version = 2 * HALF_B.num_parameters
    on_disk, in_memory = made(0.0), made(2 * 3 * version / GIB + 0.01)
    assert made(2 * 3 * version / GIB - 0.01) == on_disk
    assert in_memory.peak_bytes - on_disk.peak_bytes == 2 * version
    assert in_memory.parts["published weights in /dev/shm"] == 2 * version
    assert sum(in_memory.parts.values()) == in_memory.peak_bytes
    assert not any(name == WEIGHT_SYNC and num_bytes for name, num_bytes in on_disk.parts.items())
