"""Functions that read published weights, for assertions."""

from pathlib import Path

from torch import Tensor

from ftis_node.workers.durable import newest_complete
from ftis_node.workers.tensor_file import read_tensors
from ftis_node.workers.weight_store import PREFIX, WEIGHTS_FILE


def published_tensors(folder: Path, version: int) -> dict[str, Tensor]:
    return read_tensors(folder / f"{PREFIX}{version:08d}" / WEIGHTS_FILE)


def newest_version(folder: Path) -> int | None:
    newest = newest_complete(folder, PREFIX)
    return None if newest is None else int(newest.name.removeprefix(PREFIX))
