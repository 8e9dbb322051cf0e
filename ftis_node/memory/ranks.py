"""Memory of a learner of several ranks, each with its part of the weights (FSDP2). Bytes everywhere."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from ftis_node.memory.learner_memory import FLOAT32, LearnerMemory, Workload
from ftis_node.models import ModelShape


def memory_per_rank(learner: LearnerMemory, shape: ModelShape, workload: Workload) -> LearnerMemory:
    """Return the memory of one of `workload.learner_ranks` GPUs; `learner` is that of a GPU that holds everything.

    The weights of the unit at work (a decoder layer, or embedding and head) are complete in the compute dtype. Those of
    the next layer are beside it. So is its gradient, until it is reduced over the ranks in float32. Activations and
    work space are not divided.
    """
    number = workload.learner_ranks
    if number == 1:
        return learner
    root = shape.embedding_parameters * (1 if shape.is_tied else 2)
    layer = ceil((shape.num_parameters - root) / shape.num_layers)
    trained_layer, trained_root = layer, root
    if workload.lora_rank is not None:
        trained_layer, trained_root = ceil(shape.adapter_parameters(workload.lora_rank) / shape.num_layers), 0
    return replace(
        learner,
        weights=ceil(learner.weights / number),
        start=ceil(learner.start / number),
        masters=ceil(learner.masters / number),
        moments=ceil(learner.moments / number),
        gradients=ceil(learner.gradients / number)
        + (workload.dtype_bytes + FLOAT32) * max(trained_layer, trained_root),
        work=learner.work + workload.dtype_bytes * (root + 2 * layer),
    )
