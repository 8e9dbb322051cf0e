"""New weights into a model that is being served: the file is checked first, then copied into the same memory.

So a file that is damaged, incomplete or of another model changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ftis_node.generation.engines.published import check_published
from ftis_node.ipc.tensor_file import checksum, read_tensors
from ftis_node.models import tied_names

if TYPE_CHECKING:
    from pathlib import Path


def load_in_place(model: Any, path: Path) -> dict[str, int]:
    """Copy the published weights in `path` into `model`. Raises ModelError as `check_published` does.

    Returns the checksums of what `model` holds then, but for tensors that were converted.
    """
    tied = tied_names(model)
    own = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    check_published(path, {name: tuple(tensor.shape) for name, tensor in own.items()}, optional=tied)
    tensors = read_tensors(path)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    return {name: checksum(tensor) for name, tensor in own.items() if tensor.dtype == tensors[name].dtype}
