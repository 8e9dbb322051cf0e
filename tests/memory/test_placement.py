"""The placement that `join` derives from the memory plan: time sharing, shares of a GPU, assigned GPUs, refusals."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ftis_node.cli.options import generation_settings
from ftis_node.config.home import Home
from ftis_node.config.manifest import load_manifest
from ftis_node.config.node import NodeSettings, load_node_settings
from ftis_node.errors import ConfigError, MachineError, ModelError
from ftis_node.generation.engines.vllm_options import engine_arguments
from ftis_node.lab.tiny_tokenizer import make_tokenizer
from ftis_node.memory import placement
from ftis_node.memory.learner_memory import Workload, learner_memory
from ftis_node.memory.placement import (
    GpuAssignment,
    WorkerPlacement,
    arrange,
    assign_gpus,
    place_single_worker,
    place_workers_on,
    visible_gpus,
)
from ftis_node.memory.plan import USABLE_SHARE, Machine, MemoryPlan, plan
from ftis_node.memory.suggestions import MemorySuggestion
from ftis_node.models import ModelSource, PromptTokenizer, shape_of
from ftis_node.node.startup import factories as makers
from ftis_node.node.startup.factories import generation_boot, learner_boot
from tests.models.test_model_shape import QWEN_05B, QWEN_3B

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.models import ModelShape

GIB = 1 << 30
HALF_B, THREE_B = shape_of(QWEN_05B), shape_of(QWEN_3B)
RUN = load_manifest("gsm8k-ftis")
HOST_BYTES = 64 * GIB
PEER_ID = "12D3KooWKVUU6HyBAxFk1xtH4qEU7NmphAH9gx5PWRmJPNd1wnPM"


def settings(**changes: Any) -> NodeSettings:
    """Return settings with vLLM and 128 concurrent completions, updated by `changes`."""
    generation = {"max_batch": 128} | changes.pop("generation", {})
    return NodeSettings.model_validate({"model": "m", "engine": "vllm", "generation": generation} | changes)


def arranged(shape: ModelShape | None, *gpus_gib: float, **changes: Any) -> WorkerPlacement:
    machine = Machine(tuple(int(gib * GIB) for gib in gpus_gib), HOST_BYTES)
    return place_workers_on(machine, shape, settings(**changes), RUN)


def planned(shape: ModelShape, *gpus_gib: float, **changes: Any) -> Any:
    machine = Machine(tuple(int(gib * GIB) for gib in gpus_gib), HOST_BYTES)
    return plan(shape, machine, settings(**changes), RUN)


def of_learner(made: MemoryPlan) -> dict[str, Any]:
    """Return the plan's settings of the learner's computation."""
    return {"recompute_activations": made.recompute_activations, "head_chunk_tokens": made.head_chunk_tokens}


def test_on_a_shared_gpu_the_engine_has_the_plans_share_and_cache() -> None:
    made = planned(HALF_B, 24)
    assert made.placement == "shared"
    assert arranged(HALF_B, 24) == WorkerPlacement(
        memory_share=made.gpu_memory_utilization,
        cache_bytes=made.kv_cache_bytes,
        learner_share=made.learner_share,
        hand_over="ipc",
        **of_learner(made),
    )


def test_on_a_shared_gpu_the_learner_is_limited_to_the_memory_without_the_engine() -> None:
    made = planned(HALF_B, 24)
    of_generator = sum(value for name, value in made.parts.items() if name.startswith("generator"))
    assert made.learner_share is not None
    free = made.usable_bytes - of_generator - made.parts["learner: context"]
    assert 0 <= free - made.learner_share * 24 * GIB < 0.001 * 24 * GIB
    assert made.learner_share * 24 * GIB >= made.peak_bytes - of_generator - made.parts["learner: context"]
    for other in (planned(THREE_B, 24, lora=True), planned(HALF_B, 24, 24), planned(HALF_B), planned(THREE_B, 4)):
        assert (other.placement != "shared", other.learner_share) == (True, None)
    assert arranged(HALF_B, 24, generation={"gpu_memory_utilization": 0.4}).learner_share is None
    assert arranged(HALF_B, 24, memory={"placement": "time_shared"}).learner_share is None


@pytest.mark.parametrize(
    ("gpus", "changes", "transport"),
    [
        ((24,), {}, "ipc"),
        ((24,), {"memory": {"placement": "time_shared"}}, "ipc"),
        ((24,), {"engine": "torch"}, "ipc"),
        ((24, 24), {}, "pinned"),
        ((80, 24, 24), {"learner": {"processes": 2}}, "pinned"),
        ((24,), {"lora": True}, "file"),
        ((24,), {"lora": True, "generation": {"adapters": "merge"}}, "pinned"),
        ((24,), {"lora": True, "engine": "torch"}, "pinned"),
        ((24,), {"memory": {"weight_sync": "pinned"}}, "pinned"),
        ((24,), {"memory": {"weight_sync": "file"}}, "file"),
        ((), {}, "file"),
    ],
)
def test_the_transport_of_weights_follows_from_the_plan(
    gpus: tuple[int, ...], changes: dict[str, Any], transport: str
) -> None:
    assert arranged(HALF_B, *gpus, **changes).hand_over == transport


def test_workers_that_do_not_fit_together_share_time() -> None:
    made = planned(THREE_B, 24, lora=True)
    assert made.placement == "time_shared"
    assert arranged(THREE_B, 24, lora=True) == WorkerPlacement(
        takes_turns=True,
        can_sleep=True,
        memory_share=made.gpu_memory_utilization,
        cache_bytes=made.kv_cache_bytes,
        **of_learner(made),
    )


@pytest.mark.parametrize(
    ("engine", "placement", "gpus_gib", "takes_turns", "can_sleep"),
    [
        ("vllm", "time_shared", (24,), True, True),
        ("vllm", "shared", (24,), False, False),
        ("torch", "auto", (24,), False, False),
        ("torch", "time_shared", (24,), True, False),
        ("vllm", "auto", (), False, False),
        ("vllm", "time_shared", (), True, False),
        ("vllm", "time_shared", (24, 24), False, False),
    ],
)
def test_the_setting_overrides_the_plan_on_one_device(
    engine: str, placement: str, gpus_gib: tuple[float, ...], takes_turns: bool, can_sleep: bool
) -> None:
    made = arranged(HALF_B, *gpus_gib, engine=engine, memory={"placement": placement})
    assert (made.takes_turns, made.can_sleep) == (takes_turns, can_sleep)


def test_the_plan_follows_the_setting() -> None:
    assert planned(HALF_B, 24, memory={"placement": "time_shared"}).placement == "time_shared"
    assert planned(THREE_B, 24, lora=True, memory={"placement": "shared"}).placement == "does_not_fit"


def test_each_worker_has_one_of_two_gpus_unless_configured() -> None:
    first = arranged(HALF_B, 80, 24)
    assert (first.generator_gpus, first.learner_gpus, first.takes_turns) == ((0,), (1,), False)
    swapped = arranged(HALF_B, 80, 24, learner={"gpus": [0]})
    assert (swapped.generator_gpus, swapped.learner_gpus) == ((1,), (0,))
    assert swapped.memory_share == planned(HALF_B, 24, 80).gpu_memory_utilization
    shared = arranged(THREE_B, 80, 24, lora=True, generation={"gpus": [1]}, learner={"gpus": [1]})
    assert (shared.generator_gpus, shared.learner_gpus, shared.takes_turns) == ((1,), (1,), True)
    assert shared.cache_bytes == planned(THREE_B, 24, lora=True).kv_cache_bytes


def test_a_generator_on_two_gpus_halves_its_cache() -> None:
    made = arranged(THREE_B, 24, 24, 80, generation={"engine_options": {"tensor_parallel_size": 2}})
    whole = planned(THREE_B, 48, 80)
    assert made == WorkerPlacement(
        memory_share=whole.gpu_memory_utilization,
        cache_bytes=whole.kv_cache_bytes // 2,
        hand_over="pinned",
        generator_gpus=(0, 1),
        learner_gpus=(2,),
        **of_learner(whole),
    )


@pytest.mark.parametrize(
    ("num_gpus", "changes", "problem"),
    [
        (1, {"generation": {"gpus": [1]}}, "name GPU 1: this node sees 1 GPUs"),
        (0, {"learner": {"gpus": [0]}}, "name GPU 0: this node sees 0 GPUs"),
        (2, {"generation": {"engine_options": {"tensor_parallel_size": 4}}}, "ask for 4 GPUs: this node sees 2"),
        (
            3,
            {"generation": {"engine_options": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}},
            "ask for 4 GPUs: this node sees 3",
        ),
        (2, {"generation": {"gpus": [0, 1]}}, "ask for 1 GPUs: generation.gpus names 2"),
        (
            2,
            {"generation": {"engine_options": {"tensor_parallel_size": 2}}},
            "on 2 and a learner on 1 GPUs cannot share",
        ),
        (2, {"learner": {"processes": 2}}, "on 1 and a learner on 2 GPUs cannot share one"),
        (
            2,
            {"learner": {"gpus": [0, 1]}, "generation": {"gpus": [1]}},
            "on 1 and a learner on 2 GPUs cannot share one",
        ),
        (2, {"learner": {"processes": 3}}, "learner.processes asks for 3 GPUs: this node sees 2"),
    ],
)
def test_an_impossible_assignment_of_gpus_is_refused(num_gpus: int, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        assign_gpus(num_gpus, settings(**changes))


def test_a_learner_on_two_gpus_holds_half_of_its_weights_on_each() -> None:
    small = {"micro_batch_tokens": 2048, "recompute_activations": True}
    made = arranged(THREE_B, 80, 40, 40, learner={"processes": 2, **small})
    assert (made.generator_gpus, made.learner_gpus, made.takes_turns) == ((0,), (1, 2), False)
    assert assign_gpus(3, settings(learner={"gpus": [0, 2]})) == GpuAssignment((1,), (0, 2))
    alone, together = (
        planned(THREE_B, 80, 40, learner=small),
        planned(THREE_B, 80, 40, learner=small | {"processes": 2}),
    )
    assert (alone.fits, together.fits) == (False, True)
    for part in ("learner: weights", "learner: Adam's moments"):
        assert together.parts[part] == alone.parts[part] / 2
    # Gathered: the tied embedding and two of 36 layers in bfloat16, and a gradient of the larger in both formats.
    root = THREE_B.embedding_parameters
    layer = -(-(THREE_B.num_parameters - root) // 36)
    workload = Workload.of(settings(learner=small), RUN, on_gpu=True)
    work = learner_memory(THREE_B, replace(workload, head_chunk_tokens=together.head_chunk_tokens)).work
    gathered = together.parts["learner: logits and work space"] - work
    assert gathered == 2 * (root + 2 * layer)
    assert together.parts["learner: gradients"] == alone.parts["learner: gradients"] / 2 + 6 * max(root, layer)


def test_both_workers_are_assigned_to_a_single_gpu() -> None:
    assert assign_gpus(1, settings()) == GpuAssignment((0,), (0,))


def test_a_model_that_does_not_fit_is_refused_in_one_line() -> None:
    with pytest.raises(MachineError) as refused:
        arranged(THREE_B, 24)
    line = str(refused.value)
    made = planned(THREE_B, 24)
    assert f"{made.peak_bytes / GIB:.2f} GiB needed, {made.usable_bytes / GIB:.2f} GiB usable" in line
    assert "--lora (rank 128) would do" in line
    assert refused.value.exit_code == 3
    assert "\n" not in line


def test_without_a_change_that_fits_the_error_suggests_a_smaller_model() -> None:
    with pytest.raises(MachineError, match="use a smaller model or a larger device"):
        arranged(THREE_B, 4)


def test_with_check_warn_a_model_that_does_not_fit_is_time_shared(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = arranged(THREE_B, 4, memory={"check": "warn"})
    assert [record.message for record in caplog.records][0].startswith("m does not fit on the GPU")
    assert (made.takes_turns, made.can_sleep, made.memory_share) == (True, True, USABLE_SHARE)


def test_too_little_host_memory_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = place_workers_on(Machine((), GIB // 2), HALF_B, settings(), RUN)
    assert made == WorkerPlacement()
    assert "memory may be short: m seems to need" in caplog.text


def test_without_a_shape_there_is_no_plan_and_the_engine_uses_its_defaults() -> None:
    assert arranged(None, 24) == WorkerPlacement(takes_turns=True, can_sleep=True, hand_over="ipc")
    assert arranged(None, 24, 24) == WorkerPlacement(generator_gpus=(0,), learner_gpus=(1,), hand_over="pinned")


def test_with_an_explicit_share_vllm_sizes_the_cache() -> None:
    made = arranged(HALF_B, 24, generation={"gpu_memory_utilization": 0.4})
    assert (made.memory_share, made.cache_bytes) == (0.4, None)


@pytest.fixture
def gpus_of_torch(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of GPU sizes in GiB that torch reports; empty at first."""
    cards: list[float] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(name=f"card {index}", total_memory=int(cards[index] * GIB)),
    )
    return cards


def flags(tmp_path: Path, number: int | None = None, parallel: int | None = None, **more: Any) -> NodeSettings:
    """Return the settings of `join --gpus NUMBER --tensor-parallel PARALLEL`."""
    given = {"model": "m", "engine": "vllm", "gpus": number, "generation": generation_settings(parallel)}
    return load_node_settings(tmp_path / "node.toml", **given | more)


@pytest.mark.parametrize(
    ("cards", "number", "parallel", "generator", "learner"),
    [
        ([80], 1, None, (), ()),  # a single card is not assigned explicitly
        ([80, 80], 1, None, (0,), (0,)),
        ([80, 80], None, None, (0,), (1,)),
        ([80, 80], 2, None, (0,), (1,)),
        ([80] * 4, None, None, (0,), (1,)),
        ([80] * 4, 4, None, (0,), (1, 2, 3)),
        ([80] * 4, 3, 2, (0, 1), (2,)),
        ([80] * 4, 4, 2, (0, 1), (2, 3)),
    ],
)
def test_the_generator_has_its_parallel_gpus_and_the_learner_the_others(
    tmp_path: Path,
    gpus_of_torch: list[float],
    monkeypatch: pytest.MonkeyPatch,
    cards: list[float],
    number: int | None,
    parallel: int | None,
    generator: tuple[int, ...],
    learner: tuple[int, ...],
) -> None:
    gpus_of_torch[:] = cards
    monkeypatch.setattr(placement, "read_shape", lambda source: THREE_B)
    given = flags(tmp_path, number, parallel, lora=True)
    source = ModelSource("m", tmp_path)
    made = arrange(given, RUN, source)
    assert (made.generator_gpus, made.learner_gpus) == (generator, learner)
    assert given.learner.num_processes == max(1, len(learner))
    if len(learner) > 1:
        boot = learner_boot(given, RUN, ModelSource("m", tmp_path), Home(tmp_path), made, weights=tmp_path)
        assert boot.settings.num_processes == len(learner)


@pytest.mark.parametrize(
    ("cards", "number", "parallel", "more", "problem"),
    [
        ([80], 2, None, {}, "--gpus 2: this node sees 1 GPUs"),
        ([], 1, None, {}, "--gpus 1: this node sees no GPU"),
        ([], None, 2, {}, "ask for 2 GPUs: this node sees no GPU"),
        ([80] * 2, 2, 2, {}, "the learner has none: give --gpus 3, or --tensor-parallel 1"),
        ([80] * 2, 1, 2, {}, "needs 2 GPUs .* and the node may use 1: give --gpus 3 or more"),
        ([80] * 4, 4, 3, {}, "16 attention heads, which can be divided among 1, 2, 4, 8, 16 GPUs"),
        (
            [80] * 41,
            None,
            None,
            {"generation": {"engine_options": {"pipeline_parallel_size": 40}}},
            "pipeline_parallel_size is 40: the model has 36 layers",
        ),  # fmt: skip
        ([80] * 2, 1, None, {"learner": {"gpus": [1]}}, "name GPU 1: this node sees 1 GPUs"),
        ([80] * 2, 2, None, {"device": "cpu"}, 'and device = "cpu" contradict each other'),
        ([80] * 2, None, "two", {}, "tensor_parallel_size is 'two': give a number of GPUs"),
        ([80] * 2, 3, None, {"role": "learner"}, "--gpus 3: this node sees 2 GPUs"),
    ],
)
def test_an_impossible_number_of_gpus_is_a_config_error(
    tmp_path: Path,
    gpus_of_torch: list[float],
    monkeypatch: pytest.MonkeyPatch,
    cards: list[float],
    number: int | None,
    parallel: Any,
    more: dict[str, Any],
    problem: str,
) -> None:
    gpus_of_torch[:] = cards
    monkeypatch.setattr(placement, "read_shape", lambda source: THREE_B)
    source = ModelSource("m", tmp_path)
    with pytest.raises(ConfigError, match=problem) as refused:
        given = flags(tmp_path, number, parallel, **{"lora": True} | more)
        if given.role == "full":
            arrange(given, RUN, source)
        else:
            place_single_worker(given)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


def test_a_single_worker_has_all_gpus_of_the_node(tmp_path: Path, gpus_of_torch: list[float]) -> None:
    gpus_of_torch[:] = [80] * 4
    given = flags(tmp_path, 3, role="learner")
    assert (place_single_worker(given).learner_gpus, given.learner.num_processes) == ((0, 1, 2), 3)
    given = flags(tmp_path, 2, 2, role="generator", roles={"follow": PEER_ID})
    assert (place_single_worker(given).generator_gpus, given.num_generator_gpus) == ((0, 1), 2)
    assert place_single_worker(flags(tmp_path, role="learner")) == WorkerPlacement()


def test_the_visible_gpus_of_a_worker_are_a_subset_of_this_process() -> None:
    assert visible_gpus((), {"CUDA_VISIBLE_DEVICES": "3"}) == {}
    assert visible_gpus((1, 0), {}) == {"CUDA_VISIBLE_DEVICES": "1,0"}
    assert visible_gpus((1,), {"CUDA_VISIBLE_DEVICES": "2, GPU-7"}) == {"CUDA_VISIBLE_DEVICES": "GPU-7"}


def test_an_unreadable_shape_is_logged_and_gives_no_plan(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable(source: Any) -> Any:
        raise ModelError("config.json describes a mixture of experts: its memory cannot be planned")

    monkeypatch.setattr(placement, "read_shape", unreadable)
    monkeypatch.setattr(placement, "pick_device", lambda device: "cpu")
    with caplog.at_level(logging.WARNING):
        assert arrange(settings(engine="auto"), RUN, source=None) == WorkerPlacement()  # type: ignore[arg-type]
    assert "mixture of experts" in caplog.text


def test_the_boot_messages_contain_the_placement(tmp_path: Path) -> None:
    made = WorkerPlacement(takes_turns=True, can_sleep=True, memory_share=0.5, cache_bytes=GIB, learner_share=0.25)
    source = ModelSource(name="m", folder=tmp_path)
    tokenizer = PromptTokenizer(make_tokenizer(), name="tiny")
    boot = generation_boot(settings(device="cpu"), RUN, source, tokenizer, made)
    arguments = engine_arguments(source, boot.settings, device="cuda", seed=0)
    assert (arguments["gpu_memory_utilization"], arguments["kv_cache_memory_bytes"]) == (0.5, GIB)
    assert arguments["enable_sleep_mode"] is True
    assert engine_arguments(source, boot.settings, device="cpu", seed=0)["enable_sleep_mode"] is False
    learning = learner_boot(settings(device="cpu"), RUN, source, Home(tmp_path), made, weights=tmp_path)
    assert (learning.takes_turns, learning.memory_share) == (True, 0.25)


def test_the_learner_boot_contains_the_plans_recomputation_and_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(makers, "pick_device", lambda device: "cuda")
    source = ModelSource(name="m", folder=tmp_path)

    def booted(*gpus_gib: float, **changes: Any) -> tuple[bool, bool, int]:
        given, machine = settings(**changes), Machine(tuple(int(gib * GIB) for gib in gpus_gib), HOST_BYTES)
        boot = learner_boot(
            given, RUN, source, Home(tmp_path), place_workers_on(machine, HALF_B, given, RUN), weights=tmp_path
        )
        return boot.recompute_activations, boot.may_recompute, boot.head_chunk_tokens

    # 16,384 tokens of a 0.5B model keep 24 GiB of activations.
    assert booted(139) == (False, True, 2048)
    assert booted(24) == (True, True, 2048)
    assert booted(139, learner={"recompute_activations": True}) == (True, False, 2048)
    assert booted(139, learner={"recompute_activations": False}) == (False, False, 2048)
    assert learner_boot(
        settings(), RUN, source, Home(tmp_path), WorkerPlacement(), weights=tmp_path
    ).recompute_activations, "without a plan activations are recomputed"


def test_the_advice_is_the_first_change_that_fits() -> None:
    changes = (
        MemorySuggestion("learner.optimizer_states = 8bit", "does_not_fit", peak_bytes=1, fits=False),
        MemorySuggestion("dtype = bfloat16", "shared", peak_bytes=1, fits=True),
    )
    assert placement._advice(replace(planned(THREE_B, 24), changes=changes)) == "dtype = bfloat16 would do"
