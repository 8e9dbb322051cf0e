"""A node of a swarm whose members train different models and share GRPO rollouts.

The public names are imported at their first use, so `import ftis_node` loads no PyTorch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftis_node import algorithms, tasks
    from ftis_node.config.manifest import RunManifest as Manifest
    from ftis_node.records.envelope import decode_envelope
    from ftis_node.replay.export import RolloutTable as ReplayBuffer
    from ftis_node.tasks.base import Task

__version__ = "0.1.0"
__all__ = ["Manifest", "ReplayBuffer", "Task", "algorithms", "decode_envelope", "tasks"]

_PUBLIC = {
    "Manifest": ("ftis_node.config.manifest", "RunManifest"),
    "ReplayBuffer": ("ftis_node.replay.export", "RolloutTable"),
    "Task": ("ftis_node.tasks.base", "Task"),
    "decode_envelope": ("ftis_node.records.envelope", "decode_envelope"),
}

# Before torch is imported, in every process: else torch counts the fastest GPU first, and vLLM and nvidia-smi do not.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in ("algorithms", "tasks"):
        return import_module(f"{__name__}.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    """Return the public names, for completion in a notebook before their first use."""
    return sorted({*globals(), *__all__})
