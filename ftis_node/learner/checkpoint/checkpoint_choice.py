"""Selection of the checkpoint from which a learner resumes. Rank 0 alone reads it; the other ranks may have no disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec
import torch

from ftis_node.learner.checkpoint.checkpoint import Checkpoint, CheckpointState, newest_usable, tidy
from ftis_node.workers.weights.tensor_file import DTYPES, NAMES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from ftis_node.learner.checkpoint.checkpoint import CheckpointOwner
    from ftis_node.learner.distributed.ranks import Ranks
    from ftis_node.learner.messages import CheckpointSkipped


class TensorForm(msgspec.Struct, frozen=True):
    """Number format and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


class CheckpointHeader(msgspec.Struct, frozen=True):
    """What rank 0 sends of a checkpoint before its tensors: the state, their forms, and the random states."""

    state: CheckpointState
    weights: dict[str, TensorForm]
    moments: dict[str, TensorForm]
    random_state: bytes
    cuda_random_state: bytes | None


class BroadcastTensors(Mapping[str, "Tensor"]):
    """Tensors of rank 0 by name. Reading one is a collective call: all ranks read the same ones in the same order.

    So no other rank holds more than one full tensor at once.
    """

    def __init__(self, ranks: Ranks, forms: Mapping[str, TensorForm], own: Mapping[str, Tensor] | None) -> None:
        self._ranks = ranks
        self._forms = forms
        self._own = own

    def __getitem__(self, name: str) -> Tensor:
        form = self._forms[name]
        if self._own is not None:
            return self._ranks.broadcast_tensor(self._own[name].contiguous())
        return self._ranks.broadcast_tensor(torch.empty(form.shape, dtype=DTYPES[form.dtype]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._forms)

    def __len__(self) -> int:
        return len(self._forms)


def find_checkpoint(
    folder: Path,
    *,
    owner: CheckpointOwner,
    shapes: Mapping[str, torch.Size],
    ranks: Ranks,
    on_skipped: Callable[[CheckpointSkipped], None],
) -> Checkpoint | None:
    """Return the newest readable checkpoint, None in a home without any. Rank 0 reads it and cleans up.

    Raises as `newest_usable` does, on every rank.
    """
    found: Checkpoint | None = None
    with ranks.agreed():
        if ranks.rank == 0:
            found, damaged = newest_usable(folder, owner=owner, shapes=shapes)
            for skipped in damaged:
                on_skipped(skipped)
            tidy(folder, damaged)
    if ranks.size == 1:
        return found
    data = ranks.broadcast(b"" if found is None else msgspec.msgpack.encode(_header_of(found)))
    if not data:
        return None
    header = msgspec.msgpack.decode(data, type=CheckpointHeader)
    cuda = header.cuda_random_state
    return Checkpoint(
        header.state,
        BroadcastTensors(ranks, header.weights, None if found is None else found.weights),
        BroadcastTensors(ranks, header.moments, None if found is None else found.moments),
        _from_bytes(header.random_state),
        None if cuda is None else _from_bytes(cuda),
    )


def _header_of(found: Checkpoint) -> CheckpointHeader:
    cuda = found.cuda_random_state
    return CheckpointHeader(
        found.state,
        _forms_of(found.weights),
        _forms_of(found.moments),
        found.random_state.numpy().tobytes(),
        None if cuda is None else cuda.numpy().tobytes(),
    )


def _forms_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorForm]:
    return {name: TensorForm(NAMES[value.dtype], tuple(value.shape)) for name, value in tensors.items()}


def _from_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
