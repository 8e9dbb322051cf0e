"""The accelerators of this machine, as facts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One CUDA device."""

    name: str
    memory_bytes: int


def list_accelerators() -> list[Accelerator]:
    """The CUDA devices that torch sees, in its order."""
    import torch

    properties = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return [Accelerator(found.name, found.total_memory) for found in properties]
