"""A policy spread over ranks with FSDP2: each holds a part of every weight, and of its gradient and moments.

Every decoder layer is a unit, gathered for its pass and let go after it; embedding, last norm and output head are the
root's. The head is applied outside of the model's own forward (`logprobs.py`), so the root is a module around all of
it: whatever needs weights runs inside `Policy.compute`, and there it finds them whole.

A model comes to its ranks empty (`models/empty.py`): each part is made where it stays, and filled with the rows that it
is of (`fill`), so that no process ever holds the whole.

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

    from ftis_node.learner.distributed.ranks import RankGroup
    from ftis_node.learner.model.policy import Policy
    from ftis_node.models import WeightRows


class _Root(nn.Module):
    """The unit that holds what no layer does. Its forward is any work with the model."""

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, work: Callable[[Any], Any]) -> Any:
        return work(self.causal_lm)


def shard(policy: Policy, ranks: RankGroup) -> Policy:
    """`policy`, whole on the CPU of every rank or without memory (meta), spread over the ranks' devices.

    Its parameters become others; those that had no memory have some then, to be filled.
    """
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
    names = [list(same) for same in _same_parameters(policy.causal_lm)]
    device = torch.device(mesh.device_type)
    root._apply(  # type: ignore[no-untyped-call]
        lambda value: torch.empty_like(value, device=device) if value.device.type == "meta" else value
    )
    for first, *others in names:  # `_apply` makes tied ones apart
        for other in others:
            _put(policy.causal_lm, other, policy.causal_lm.get_parameter(first))
    return replace(policy, root=root)


@torch.no_grad()
def fill(policy: Policy, rows: WeightRows, ranks: RankGroup) -> None:
    """Fill the parts that this rank holds with the rows that they are of, rounded to the compute dtype first."""
    for name, value in policy.causal_lm.named_parameters():
        if ".lora_" in name:  # made here, and in no file
            continue
        part = value.to_local()
        per_rank = -(-value.shape[0] // ranks.size)
        start, end = (min(number * per_rank, value.shape[0]) for number in (ranks.rank, ranks.rank + 1))
        assert part.shape[0] == end - start, f"{name}: {tuple(part.shape)} are not rows {start} to {end}"
        if start < end:
            part.copy_(rows.read(plain_name(name), start, end).to(policy.compute_dtype))
    for name, value in policy.causal_lm.named_buffers():
        if plain_name(name) in rows:
            value.copy_(rows.read(plain_name(name)))


def hollow(causal_lm: Any) -> None:
    """Give the parameters that have no memory a form that an adapter can be put beside: zeros, one number each."""
    _replace_parameters(
        causal_lm, lambda value: torch.zeros((), dtype=value.dtype).expand(value.shape) if value.is_meta else value
    )


def back_to_meta(causal_lm: Any) -> None:
    """Undo `hollow`; what was put beside them stays as it is."""
    _replace_parameters(
        causal_lm,
        lambda value: (
            torch.empty_like(value, device="meta") if value.untyped_storage().nbytes() < value.nbytes else value
        ),
    )


def plain_name(name: str) -> str:
    """A tensor's name in a model without adapter."""
    return name.replace(".base_layer.", ".")


def _replace_parameters(causal_lm: Any, change: Callable[[nn.Parameter], Tensor]) -> None:
    """Every parameter by what `change` makes of it; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in causal_lm.modules():
        for name, value in module._parameters.items():
            if value is None:
                continue
            if id(value) not in made:
                changed = change(value)
                made[id(value)] = (
                    changed if isinstance(changed, nn.Parameter) else nn.Parameter(changed, value.requires_grad)
                )
            module._parameters[name] = made[id(value)]


def _same_parameters(causal_lm: Any) -> Iterable[list[str]]:
    """The names of each parameter that has several."""
    by_parameter: dict[int, list[str]] = {}
    for name, value in causal_lm.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(value), []).append(name)
    return [names for names in by_parameter.values() if len(names) > 1]


def _put(causal_lm: Any, name: str, value: nn.Parameter) -> None:
    module, _, own_name = name.rpartition(".")
    causal_lm.get_submodule(module)._parameters[own_name] = value


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
