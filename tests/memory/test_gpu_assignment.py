"""The GPUs that each worker of a node has, by the settings and the number of GPUs."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftis_node.cli.options import generation_settings
from ftis_node.config.home import Home
from ftis_node.config.node import NodeSettings, load_node_settings
from ftis_node.errors import ConfigError
from ftis_node.memory import placement
from ftis_node.memory.learner_memory import Workload, learner_memory
from ftis_node.memory.machine import GpuAssignment
from ftis_node.memory.placement import WorkerPlacement, arrange, assign_gpus, place_single_worker, visible_gpus
from ftis_node.models import ModelSource
from ftis_node.node.startup.worker_boots import learner_boot
from tests.memory.planning import GIB, HALF_B, RUN, THREE_B, arranged, of_learner, planned, vllm_settings

PEER_ID = "12D3KooWKVUU6HyBAxFk1xtH4qEU7NmphAH9gx5PWRmJPNd1wnPM"


def test_each_worker_has_one_of_two_gpus_unless_configured():
    first = arranged(HALF_B, 24, 24)
    assert (first.generator_gpus, first.learner_gpus, first.takes_turns) == ((0,), (1,), False)
    swapped = arranged(HALF_B, 80, 24, learner={"gpus": [0]})
    assert (swapped.generator_gpus, swapped.learner_gpus) == ((1,), (0,))
    assert swapped.memory_share == planned(HALF_B, 24, 80).gpu_memory_utilization
    shared = arranged(THREE_B, 80, 24, lora=True, generation={"gpus": [1]}, learner={"gpus": [1]})
    assert (shared.generator_gpus, shared.learner_gpus, shared.takes_turns) == ((1,), (1,), True)
    assert shared.cache_bytes == planned(THREE_B, 24, lora=True).kv_cache_bytes


def test_a_generator_on_two_gpus_halves_its_cache():
    made = arranged(THREE_B, 24, 24, 80, generation={"engine_options": {"tensor_parallel_size": 2}})
    whole = planned(THREE_B, 48, 80)
    assert made == WorkerPlacement(
        memory_share=whole.gpu_memory_utilization,
        cache_bytes=whole.kv_cache_bytes // 2,
        transfer="pinned",
        generator_gpus=(0, 1),
        learner_gpus=(2,),
        **of_learner(whole),
    )


@pytest.mark.parametrize(
    ("num_gpus", "changes", "problem"),
    [
        (1, {"generation": {"gpus": [1]}}, "name GPU 1: this node sees 1 GPUs"),
        (2, {"generation": {"engine_options": {"tensor_parallel_size": 4}}}, "ask for 4 GPUs: this node sees 2"),
        (2, {"generation": {"gpus": [0, 1]}}, "ask for 1 GPUs: generation.gpus names 2"),
        (2, {"generation": {"engine_options": {"tensor_parallel_size": 2}}}, "on 2 and a learner on 1 GPUs cannot"),
        (2, {"learner": {"gpus": [0, 1]}, "generation": {"gpus": [1]}}, "on 1 and a learner on 2 GPUs cannot share"),
        (2, {"learner": {"processes": 3}}, "learner.processes asks for 3 GPUs: this node sees 2"),
    ],
)
def test_an_impossible_assignment_of_gpus_is_refused(num_gpus, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        assign_gpus(num_gpus, vllm_settings(**changes))


def test_a_learner_on_two_gpus_holds_half_of_its_weights_on_each():
    small = {"micro_batch_tokens": 2048, "recompute_activations": True}
    made = arranged(THREE_B, 80, 40, 40, learner={"processes": 2, **small})
    assert (made.generator_gpus, made.learner_gpus, made.takes_turns) == ((0,), (1, 2), False)
    assert assign_gpus(3, vllm_settings(learner={"gpus": [0, 2]})) == GpuAssignment((1,), (0, 2))
    alone = planned(THREE_B, 80, 40, learner=small)
    together = planned(THREE_B, 80, 40, learner=small | {"processes": 2})
    assert (alone.fits, together.fits) == (False, True)
    for part in ("learner: weights", "learner: Adam's moments"):
        assert together.parts[part] == alone.parts[part] / 2
    # Gathered: the tied embedding and two of 36 layers in bfloat16, and a gradient of the larger in both formats.
    root = THREE_B.embedding_parameters
    layer = -(-(THREE_B.num_parameters - root) // 36)
    workload = Workload.of(vllm_settings(learner=small), RUN, on_gpu=True)
    work = learner_memory(THREE_B, replace(workload, head_chunk_tokens=together.head_chunk_tokens)).work
    gathered = together.parts["learner: logits and work space"] - work
    assert gathered == 2 * (root + 2 * layer)
    assert together.parts["learner: gradients"] == alone.parts["learner: gradients"] / 2 + 6 * max(root, layer)


@pytest.fixture
def gpus_of_torch(monkeypatch):
    """Return the list of GPU sizes in GiB that torch reports; empty at first."""
    cards: list[float] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))

    def properties(index: int) -> SimpleNamespace:
        kind = {"name": f"card {index}", "major": 9, "minor": 0, "uuid": str(index)}
        return SimpleNamespace(total_memory=int(cards[index] * GIB), **kind)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
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
        ([80] * 4, 4, None, (0,), (1, 2, 3)),
        ([80] * 4, 3, 2, (0, 1), (2,)),
        ([80] * 4, 4, 2, (0, 1), (2, 3)),
    ],
)
def test_the_generator_has_its_parallel_gpus_and_the_learner_the_others(
    tmp_path, gpus_of_torch, monkeypatch, cards, number, parallel, generator, learner
):
    gpus_of_torch[:] = cards
    monkeypatch.setattr(placement, "read_shape", lambda source: THREE_B)
    given = flags(tmp_path, number, parallel, lora=True)
    source = ModelSource("m", tmp_path)
    made = arrange(given, RUN, source)
    assert (made.generator_gpus, made.learner_gpus) == (generator, learner)
    assert given.learner.num_ranks == max(1, len(learner))
    if len(learner) > 1:
        boot = learner_boot(given, RUN, ModelSource("m", tmp_path), Home(tmp_path), made, weights=tmp_path)
        assert boot.settings.num_ranks == len(learner)


PIPELINE = {"generation": {"engine_options": {"pipeline_parallel_size": 40}}}


@pytest.mark.parametrize(
    ("cards", "number", "parallel", "more", "problem"),
    [
        ([80], 2, None, {}, "--gpus 2: this node sees 1 GPUs"), ([], 1, None, {}, "--gpus 1: this node sees no GPU"),
        ([], None, 2, {}, "ask for 2 GPUs: this node sees no GPU"),
        ([80] * 2, 2, 2, {}, "the learner has none: give --gpus 3, or --tensor-parallel 1"),
        ([80] * 2, 1, 2, {}, "needs 2 GPUs .* and the node may use 1: give --gpus 3 or more"),
        ([80] * 4, 4, 3, {}, "16 attention heads, which can be divided among 1, 2, 4, 8, 16 GPUs"),
        ([80] * 41, None, None, PIPELINE, "pipeline_parallel_size is 40: the model has 36 layers"),
        ([80] * 2, 2, None, {"device": "cpu"}, 'and device = "cpu" contradict each other'),
        ([80] * 2, None, "two", {}, "tensor_parallel_size is 'two': give a number of GPUs"),
        ([80] * 2, 3, None, {"role": "learner"}, "--gpus 3: this node sees 2 GPUs"),
    ],
)  # fmt: skip
def test_an_impossible_number_of_gpus_is_a_config_error(
    tmp_path, gpus_of_torch, monkeypatch, cards, number, parallel, more, problem
):
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


def test_a_single_worker_has_all_gpus_of_the_node(tmp_path, gpus_of_torch):
    gpus_of_torch[:] = [80] * 4
    given = flags(tmp_path, 3, role="learner")
    assert (place_single_worker(given).learner_gpus, given.learner.num_ranks) == ((0, 1, 2), 3)
    given = flags(tmp_path, 2, 2, role="generator", roles={"follow": PEER_ID})
    assert (place_single_worker(given).generator_gpus, given.num_generator_gpus) == ((0, 1), 2)
    assert place_single_worker(flags(tmp_path, role="learner")) == WorkerPlacement()


def test_the_visible_gpus_of_a_worker_are_a_subset_of_this_process():
    assert visible_gpus((), {"CUDA_VISIBLE_DEVICES": "3"}) == {}
    assert visible_gpus((1, 0), {}) == {"CUDA_VISIBLE_DEVICES": "1,0"}
    assert visible_gpus((1,), {"CUDA_VISIBLE_DEVICES": "2, GPU-7"}) == {"CUDA_VISIBLE_DEVICES": "GPU-7"}
