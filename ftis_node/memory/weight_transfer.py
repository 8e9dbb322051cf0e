"""Transfer method of new weights from the learner to the engine, chosen before either starts.

    ipc      the engine maps the learner's own tensors (CUDA IPC)    one GPU for both, all weights trained
    pinned   a file in memory whose pages CUDA locks                 any other GPU
    file     a file in memory, or in the home                        a CPU; adapters, which are megabytes

A method that fails at run time falls back to the next one: `learner/checkpoint/export.py` and
`generation/weight_loader.py`.
"""

from __future__ import annotations

from pathlib import Path

from ftis_node.config.node import NodeSettings
from ftis_node.workers.shared_weights import Transfer

KERNEL = Path("/proc/sys/kernel/osrelease")


def transfer_of(
    settings: NodeSettings, *, on_gpu: bool, shares_gpu: bool, serves_adapters: bool, kernel: Path = KERNEL
) -> Transfer:
    """Return the fastest method that can work for these settings on this machine.

    `shares_gpu`: both workers are on one GPU. An adapter that is not served is merged on its way, tensor by tensor, so
    there is nothing to map. No rank of a learner of several ranks holds whole tensors.
    """
    if not on_gpu or serves_adapters:
        return "file"
    is_whole = not settings.lora and settings.learner.num_ranks == 1
    return "ipc" if shares_gpu and is_whole and not is_wsl(kernel) else "pinned"


def is_wsl(kernel: Path = KERNEL) -> bool:
    """Return whether this is Linux under Windows, where CUDA has no IPC."""
    return kernel.exists() and "microsoft" in kernel.read_text().lower()
