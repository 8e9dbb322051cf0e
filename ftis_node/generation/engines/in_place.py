"""In-place update of a served model: the file is validated first, then copied into the same memory.

So a file that is damaged, incomplete or of another model changes nothing. Shared weights of the learner are validated
and copied in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ftis_node.generation.engines.published import check_published, check_shared
from ftis_node.models import tied_names
from ftis_node.workers.weights.tensor_file import checksum, read_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from ftis_node.workers.weights.page_locked import LockedFiles
    from ftis_node.workers.weights.shared_tensors import OpenedWeights
    from ftis_node.workers.weights.shared_weights import SharedWeights


def load_in_place(model: Any, path: Path, *, locked: LockedFiles | None = None) -> dict[str, int]:
    """Copy the published weights in `path` into `model`. Raises ModelError as `check_published` does.

    Returns the checksums of the tensors of `model` afterwards, except converted ones.
    """
    own, tied = _own(model)
    check_published(path, _shapes(own), optional=tied)
    return _copy(own, read_tensors(path, locked=locked))


def load_shared_in_place(model: Any, shared: SharedWeights, opened: OpenedWeights) -> dict[str, int]:
    """Copy mapped weights of another process, as `load_in_place` does. Raises SharingError and ModelError."""
    own, tied = _own(model)
    opened.open(shared)
    try:
        check_shared(shared, _shapes(own), optional=tied)
        return _copy(own, dict(opened.tensors()))
    finally:
        opened.close()


def _own(model: Any) -> tuple[dict[str, Tensor], set[str]]:
    """Return the model's tensors by name, and the omitted names of tied ones."""
    tied = set(tied_names(model))
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}, tied


def _shapes(own: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in own.items()}


def _copy(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    return {name: checksum(tensor) for name, tensor in own.items() if tensor.dtype == tensors[name].dtype}
