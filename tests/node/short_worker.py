"""The generation worker, with an engine that cannot be opened in some lives, for tests.

The folder in the variable SHORT_FOLDER has a file for each life, and one named `faults` with the exception that each
life but the first raises, one a line; later lives, and the first, are sound.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ftis_node.errors import ModelError, OutOfMemoryError
from ftis_node.generation import worker
from ftis_node.generation.messages import GenerationBoot
from ftis_node.workers.worker import run_worker

if TYPE_CHECKING:
    from collections.abc import Callable

FAULTS = {
    "ours": OutOfMemoryError("the model does not fit into memory for generation"),
    "torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 594.00 MiB."),
    "model": ModelError("the model folder is gone"),
}
choose_engine = worker.choose_engine


def choose(name: Any) -> Callable[..., Any]:
    """As `choose_engine`, for a life that may have a fault."""
    folder = Path(os.environ["SHORT_FOLDER"])
    faults = ["", *(folder / "faults").read_text().split()]
    life = len(list(folder.glob("life-*")))
    (folder / f"life-{life}").touch()

    async def fail(*arguments: Any) -> Any:
        raise FAULTS[faults[life]]

    return fail if life < len(faults) and faults[life] else choose_engine(name)


if __name__ == "__main__":
    worker.choose_engine = choose
    run_worker(worker.build, boot_type=GenerationBoot)
