"""The demo's two tiny models, made side by side on two cores, and kept for the next time."""

from __future__ import annotations

import multiprocessing
import queue
from typing import TYPE_CHECKING

from ftis_node.errors import FtisError
from ftis_node.lab.tiny import RECIPES, make_tiny

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.queues import Queue
    from pathlib import Path

    from ftis_node.lab.tiny import Size

POLL_S = 0.5


def make_pair(folder: Path, *, seed: int, watch: Callable[[str], None]) -> Mapping[str, Path]:
    """Folders of the models s and m for this seed; those that are there already are used again.

    Raises FtisError where making one fails.
    """
    targets = {size: folder / f"{size}-{seed}" for size in RECIPES}
    missing = {size: target for size, target in targets.items() if not (target / "config.json").exists()}
    spawn = multiprocessing.get_context("spawn")
    progress: Queue[tuple[Size, float]] = spawn.Queue()
    workers = {
        size: spawn.Process(target=_make, args=(size, target, seed, progress)) for size, target in missing.items()
    }
    for worker in workers.values():
        worker.start()
    try:
        fractions = dict.fromkeys(missing, 0.0)
        while any(worker.is_alive() for worker in workers.values()):
            try:
                size, fraction = progress.get(timeout=POLL_S)
            except queue.Empty:
                continue
            fractions[size] = fraction
            watch("making tiny models: " + ", ".join(f"{name} {done:.0%}" for name, done in fractions.items()))
    finally:
        for worker in workers.values():
            worker.terminate()
            worker.join()
    for size, worker in workers.items():
        if not (targets[size] / "config.json").exists():
            raise FtisError(f"making the tiny model {size} failed with exit code {worker.exitcode}")
    return {str(size): target for size, target in targets.items()}


def _make(size: Size, target: Path, seed: int, progress: Queue[tuple[Size, float]]) -> None:
    """In a process of its own: the model appears at `target` when it is whole."""
    temporary = target.with_name(target.name + ".making")
    make_tiny(size, temporary, seed=seed, progress=lambda fraction, _: progress.put((size, fraction)))
    temporary.rename(target)
