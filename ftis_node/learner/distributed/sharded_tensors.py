"""Operations on tensors that are sharded over ranks: gathering, local shards, gradients.

`learner/model/policy_loading.py` shards the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from ftis_node.learner.distributed.ranks import Ranks


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this rank holds only its part of the tensor."""
    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of a possibly sharded one. A collective call: all ranks make it and get the tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return this rank's shard of `value`, which all ranks hold, if `parameter` is sharded and of equal shape."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    on_device = value.to(parameter.device)
    return distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=None)


def from_rank_0(whole: Mapping[str, Tensor], name: str, like: Tensor, ranks: Ranks) -> Tensor:
    """Return rank 0's `whole[name]` on every rank, in the dtype of `like`."""
    if ranks.rank == 0:
        return ranks.broadcast_tensor(whole[name].to(like.dtype).contiguous())
    return ranks.broadcast_tensor(torch.empty(like.shape, dtype=like.dtype))


@torch.no_grad()
def copy_from_rank_0(parts: Mapping[str, Tensor], whole: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Copy rank 0's tensors into the shards of every rank. One full tensor at a time is in memory."""
    for name, part in parts.items():
        part.copy_(part_like(part, from_rank_0(whole, name, part, ranks)))


def gradient_of(output: Tensor, parameter: Tensor, trainable: Iterable[Tensor]) -> Tensor:
    """Return d`output`/d`parameter`, summed over the ranks. Resets the gradients of `trainable`."""
    output.backward()  # type: ignore[no-untyped-call]
    assert parameter.grad is not None
    gradient = whole(parameter.grad)
    for each in trainable:
        each.grad = None
    return gradient


class TensorGatherer:
    """Gathers full tensors one by one, in the same order on every rank, each after `change(name, tensor)` in `dtype`.

    `split(name, tensor)` then divides it into the tensors to be written, by their names. `tensors` are those, but
    possibly without values. Inside the context rank 0 calls `take`, the others `rest`. If rank 0 stops early, the exit
    gathers the rest.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        change: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
        split: Callable[[str, Tensor], Mapping[str, Tensor]] = lambda name, tensor: {name: tensor},
    ) -> None:
        self.tensors = {
            part: outline
            for name, tensor in tensors.items()
            for part, outline in split(name, _outline(tensor) if is_sharded(tensor) else tensor).items()
        }
        self._dtype = dtype
        self._change = change
        self._split = split
        self._left: Iterator[tuple[str, Tensor]] = iter(tensors.items())
        self._parts: dict[str, Tensor] = {}

    def take(self, name: str, _: Tensor) -> Tensor:
        """Return the next tensor in full. The caller names it, to verify the order."""
        if not self._parts:
            self._parts = self._gather(*next(self._left))
        expected = next(iter(self._parts))
        assert name == expected, f"{name} was requested, but {expected} is next"
        return self._parts.pop(name)

    def rest(self) -> None:
        while (entry := next(self._left, None)) is not None:
            self._gather(*entry)

    def _gather(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        return dict(self._split(name, whole(self._change(name, tensor).detach().to(self._dtype))))

    def __enter__(self) -> TensorGatherer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.rest()


def _outline(tensor: Tensor) -> Tensor:
    """Return a tensor of this shape and type without values."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
