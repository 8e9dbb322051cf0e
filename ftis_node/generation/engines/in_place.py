"""New weights into a model that is being served: everything is checked first, then copied into the same memory.

So a file that is damaged, incomplete or of another model changes nothing. A tied output head is the embedding itself
and follows it; a file may name it once more or leave it out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ftis_node.errors import ModelError
from ftis_node.ipc.durable import is_complete
from ftis_node.ipc.weights import load_weights_file
from ftis_node.models import tied_names

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor


def load_in_place(model: Any, path: Path) -> None:
    """Copy the published weights in `path` into `model`.

    Raises ModelError where the file's folder is not complete, the file damaged, or a name or shape not the model's.
    """
    if not is_complete(path.parent):
        raise ModelError(f"weights in {path.parent} are not completely written")
    tensors = load_weights_file(path)
    state = model.state_dict()
    own = {name: tensor for name, tensor in state.items() if name not in tied_names(model)}
    _check_fit(own, tensors, optional=state.keys() - own.keys(), path=path)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def _check_fit(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], *, optional: set[str], path: Path) -> None:
    missing = sorted(own.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - own.keys() - optional)
    shapes = sorted(name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape)
    kinds = sorted(name for name in tensors if not tensors[name].is_floating_point())
    problems = (
        ("lacks", missing),
        ("names unknown", unknown),
        ("has another shape of", shapes),
        ("has integers in", kinds),
    )
    for problem, names in problems:
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(f"weights in {path} do not fit the model: the file {problem} {names[0]}{others}")
