"""The hub's names of a model's tensors, under which weights are published and exported.

In memory, transformers fuses the experts of a layer and renames some tensors. Other readers, such as vLLM, know only
the names of the hub's files. The conversion is that of transformers' `save_pretrained`, but as views. Nothing is
copied, and a write to a part changes the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class _Views(torch.Tensor):
    """A tensor whose parts stay views: transformers' conversion calls `contiguous` on each, which would copy it."""

    def contiguous(self, *_: Any, **__: Any) -> torch.Tensor:
        return self


def hub_tensors(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `tensors`, named as in `model`, as views by the hub's names."""
    return {part: view for name, tensor in tensors.items() for part, view in hub_parts(model, name, tensor).items()}


def hub_parts(model: Any, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a tensor of a transformers model as views of it, by the names of the hub's files.

    `name` is its name in the model. A tensor that the hub's files have in another order keeps its name.
    """
    if not getattr(model, "_weight_conversions", None):  # those that the model's own files needed
        return {name: tensor}
    from transformers.core_model_loading import revert_weight_conversion

    found = revert_weight_conversion(model, {name: tensor.detach().as_subclass(_Views)})
    storage = tensor.untyped_storage()._cdata
    if any(part.untyped_storage()._cdata != storage for part in found.values()):
        return {name: tensor}
    return {part_name: part.as_subclass(torch.Tensor) for part_name, part in found.items()}
