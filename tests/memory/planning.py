"""Models, machines and settings that the memory tests plan for."""

from typing import Any

from ftis_node.config.manifest import load_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.memory.machine import Card, Machine
from ftis_node.memory.placement import WorkerPlacement, place_workers_on
from ftis_node.memory.plan import MemoryPlan, plan
from ftis_node.models import ModelShape, shape_of
from tests.models.test_model_shape import QWEN_05B, QWEN_3B

GIB = 1 << 30
HALF_B, THREE_B = shape_of(QWEN_05B), shape_of(QWEN_3B)
RUN = load_manifest("gsm8k-ftis")  # 760 tokens, groups of 12


def machine(*gpus_gib: float, host_gib: float = 64) -> Machine:
    """Return a machine with GPUs of these sizes and free host memory, all in GiB."""
    return Machine(tuple(Card(int(gib * GIB)) for gib in gpus_gib), int(host_gib * GIB))


def vllm_settings(**changes: Any) -> NodeSettings:
    """Return settings with vLLM and 128 concurrent completions, updated by `changes`."""
    generation = {"max_batch": 128} | changes.pop("generation", {})
    return NodeSettings.model_validate({"model": "m", "engine": "vllm", "generation": generation} | changes)


def arranged(shape: ModelShape | None, *gpus_gib: float, **changes: Any) -> WorkerPlacement:
    """Return the placement of a model on these GPUs (GiB)."""
    return place_workers_on(machine(*gpus_gib), shape, vllm_settings(**changes), RUN)


def planned(shape: ModelShape, *gpus_gib: float, **changes: Any) -> MemoryPlan:
    """Return the memory plan of a model on these GPUs (GiB)."""
    return plan(shape, machine(*gpus_gib), vllm_settings(**changes), RUN)


def of_learner(made: MemoryPlan) -> dict[str, Any]:
    """Return the plan's settings of the learner's computation."""
    names = ("recompute_activations", "head_chunk_tokens", "layers_kept")
    return {name: getattr(made, name) for name in names}
