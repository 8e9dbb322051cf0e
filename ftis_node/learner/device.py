"""Copies to the model's device for which the host does not wait, and which device's values it may read at no cost."""

from __future__ import annotations

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on `device`. The host waits neither for the copy to a GPU nor for the work before it."""
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def is_free_to_read(device: torch.device) -> bool:
    """Return whether the host reads a value of `device` without a wait. A GPU first computes all that is queued."""
    return device.type == "cpu"
