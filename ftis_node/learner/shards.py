"""A policy spread over ranks with FSDP2: each holds a part of every weight, and of its gradient and moments.

Every decoder layer is a unit, gathered for its pass and let go after it; embedding, last norm and output head are the
root's. The head is applied outside of the model's own forward (`logprobs.py`), so the root is a module around all of
it: whatever needs weights runs inside `Policy.compute`, and there it finds them whole.

What is trained is sharded in float32, the masters; with bfloat16 it is cast before it is gathered, and gradients are
added up in float32. They are added, not averaged: each rank's loss is its share of one loss.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from ftis_node.learner.policy import Policy
    from ftis_node.learner.ranks import RankGroup


class _Root(nn.Module):
    """The unit that holds what no layer does. Its forward is any work with the model."""

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, work: Callable[[Any], Any]) -> Any:
        return work(self.causal_lm)


def shard(policy: Policy, ranks: RankGroup) -> Policy:
    """`policy`, which every rank has whole on its CPU, spread over the ranks' devices. Its parameters become others."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for parameter in policy.trainable().values():  # in whatever format it was loaded
        parameter.data = parameter.data.float()
    root, mesh = _Root(policy.causal_lm), ranks.mesh()
    precision = MixedPrecisionPolicy()
    if policy.compute_dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=policy.compute_dtype, reduce_dtype=torch.float32)
    layers = [module for module in policy.causal_lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    for unit in (*layers, root):
        sharded = fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return replace(policy, root=root)


def is_spread(tensor: Tensor) -> bool:
    """Whether this rank holds only its part of it."""
    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be spread: all ranks ask at once, and all get it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(parameter: Tensor, value: Tensor) -> Tensor:
    """This rank's part of `value`, which every rank has whole, spread as `parameter` is where they have one shape."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    on_device = value.to(parameter.device)
    return distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=None)


def gradient_of(output: Tensor, parameter: Tensor, trainable: Iterable[Tensor]) -> Tensor:
    """d`output`/d`parameter`, added up over the ranks. `trainable` is all that gets a gradient here, and loses it."""
    output.backward()  # type: ignore[no-untyped-call]
    assert parameter.grad is not None
    gradient = whole(parameter.grad)
    for each in trainable:
        each.grad = None
    return gradient


class Gathering:
    """Tensors made whole one by one, in the same order on every rank, each after `change(name, tensor)` in `dtype`.

    Rank 0 takes them with `take` inside of the context, the others with `rest`. If rank 0 stops halfway (its disk is
    full, say) the context's end takes the rest, so that no rank waits for another.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        change: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    ) -> None:
        self.tensors = tensors
        self._dtype = dtype
        self._change = change
        self._left: Iterator[tuple[str, Tensor]] = iter(tensors.items())

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """The next one, which must be this one."""
        expected, _ = next(self._left)
        assert name == expected, f"{name} was asked for when {expected} was next"
        return whole(self._change(name, tensor).detach().to(self._dtype))

    def rest(self) -> None:
        """Take those that are left, for the other ranks' sake."""
        while (entry := next(self._left, None)) is not None:
            whole(self._change(*entry).detach().to(self._dtype))

    def __enter__(self) -> Gathering:
        return self

    def __exit__(self, *exception: object) -> None:
        self.rest()
