"""The generation worker with an engine that fails to open in some of its starts.

The variable SHORT_FOLDER names a folder, to which each start adds a file. The file `faults` there names the exception
of each start after the first, one per line. The first start and the starts after the last line succeed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ftis_node.errors import ModelError, OutOfMemoryError
from ftis_node.generation import worker
from ftis_node.generation.messages import GenerationBoot
from ftis_node.workers.worker import run_worker

FAULTS = {
    "ftis": OutOfMemoryError("the model does not fit into memory for generation"),
    "torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 594.00 MiB."),
    "model": ModelError("the model folder is missing"),
}
choose_engine = worker.choose_engine


def choose(name: Any) -> Callable[..., Any]:
    """Choose an engine like `choose_engine`, or one that raises the exception of this start."""
    folder = Path(os.environ["SHORT_FOLDER"])
    faults = ["", *(folder / "faults").read_text().split()]
    start = len(list(folder.glob("start-*")))
    (folder / f"start-{start}").touch()

    async def fail(*arguments: Any) -> Any:
        raise FAULTS[faults[start]]

    return fail if start < len(faults) and faults[start] else choose_engine(name)


if __name__ == "__main__":
    worker.choose_engine = choose
    run_worker(worker.build, boot_type=GenerationBoot)
