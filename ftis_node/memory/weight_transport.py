"""Transport of new weights from the learner to the engine, chosen from the plan and the device before either starts.

    ipc      the engine maps the learner's own tensors (CUDA IPC)    one GPU for both, all weights trained
    pinned   a file in memory whose pages CUDA locks                 any other GPU
    file     a file in memory, or in the home                        a CPU; adapters, which are megabytes

A transport that fails at run time falls back to the next one: `learner/checkpoint/export.py` and
`generation/weight_loader.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftis_node.config.node import NodeSettings
    from ftis_node.workers.shared_weights import Way

KERNEL = Path("/proc/sys/kernel/osrelease")


def choose_transport(
    *,
    on_gpu: bool,
    shares_gpu: bool,
    lora: bool,
    serves_adapters: bool,
    num_ranks: int = 1,
    is_wsl: bool = False,
    fastest: Way = "ipc",
) -> Way:
    """Return the fastest transport that can work, up to `fastest`.

    `shares_gpu`: both workers are on one GPU. With `lora` and without `serves_adapters` the adapter is merged on its
    way, tensor by tensor, so there is nothing to map. No rank of a learner of several ranks holds whole tensors.
    """
    if not on_gpu or serves_adapters:
        return "file"
    can_map = shares_gpu and not lora and num_ranks == 1 and not is_wsl
    return "pinned" if fastest == "ipc" and not can_map else fastest


def transport_of(
    settings: NodeSettings, *, on_gpu: bool, shares_gpu: bool, serves_adapters: bool, kernel: Path = KERNEL
) -> Way:
    """Return `choose_transport` for a node with these settings on this machine."""
    mode = settings.memory.weight_sync
    return choose_transport(
        on_gpu=on_gpu,
        shares_gpu=shares_gpu,
        lora=bool(settings.lora),
        serves_adapters=serves_adapters,
        num_ranks=settings.learner.num_ranks,
        is_wsl=is_wsl(kernel),
        fastest="ipc" if mode == "auto" else mode,
    )


def is_wsl(kernel: Path = KERNEL) -> bool:
    """Return whether this is Linux under Windows, where CUDA has no IPC."""
    return kernel.exists() and "microsoft" in kernel.read_text().lower()
