"""Checks of published weights by their header, and the in-place update of a served model.

An engine copies tensors one by one into the served model and cannot undo that. So a file that is truncated, has another
shape or lacks a tensor is refused before the first one is read. So are shared weights of the learner. A tied output
head is the embedding itself: a file may contain it or omit it.

An adapter is a folder in peft's format. It must change all the layers that it names, each by two matrices of the right
shapes. Any setting that needs more than those two (DoRA, biases, ranks that differ) is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ftis_node.errors import ModelError
from ftis_node.models.loading import tied_names
from ftis_node.models.safetensors_file import read_header
from ftis_node.models.source import read_json
from ftis_node.workers.durable import is_complete
from ftis_node.workers.hub_names import hub_tensors
from ftis_node.workers.tensor_file import checksums_of, read_tensors
from ftis_node.workers.weight_store import ADAPTER_CONFIG_FILE, ADAPTER_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

    from ftis_node.models import ModelSource
    from ftis_node.workers.shared_tensors import OpenedWeights
    from ftis_node.workers.shared_weights import SharedWeights
    from ftis_node.workers.tensor_file import LockedFiles

Shapes: TypeAlias = "Mapping[str, tuple[int, ...]]"
HEAD = "lm_head.weight"
PEFT_PREFIX = "base_model.model."  # peft wraps a model twice
# peft settings with which an adapter is more than two matrices a layer. All are off by default.
PEFT_EXTRAS = ("use_dora", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save", "use_qalora")
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E5M2", "F8_E4M3")  # safetensors' names


def load_in_place(model: Any, path: Path, *, locked: LockedFiles | None = None) -> dict[str, int]:
    """Copy the published weights in `path` into `model`. Raises ModelError as `check_published` does.

    Returns the checksums of the tensors of `model` afterwards, except converted ones.
    """
    own, tied = _own(model)
    check_published(path, _shapes(own), optional=tied)
    return _copy(own, read_tensors(path, locked=locked))


def load_shared_in_place(model: Any, shared: SharedWeights, opened: OpenedWeights) -> dict[str, int]:
    """Copy mapped weights of another process, as `load_in_place` does. Raises SharingError and ModelError."""
    own, tied = _own(model)
    opened.open(shared)
    try:
        check_shared(shared, _shapes(own), optional=tied)
        return _copy(own, dict(opened.tensors()))
    finally:
        opened.close()


def _own(model: Any) -> tuple[dict[str, Tensor], set[str]]:
    """Return the model's tensors by the hub's names, as views, and the omitted names of tied ones."""
    tied = set(tied_names(model))
    own = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return hub_tensors(model, own), tied


def _shapes(own: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in own.items()}


def _copy(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    return checksums_of({name: tensor for name, tensor in own.items() if tensor.dtype == tensors[name].dtype})


def shapes_in(source: ModelSource) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Return the shapes in a model's own files, by name, and the names that a file may omit."""
    shapes = {
        name: tuple(entry["shape"])
        for path in source.weights_files
        for name, entry in read_header(path).tensors.items()
    }
    if not read_json(source.folder / "config.json").get("tie_word_embeddings", False):
        return shapes, set()
    shapes.pop(HEAD, None)
    return shapes, {HEAD}


def check_published(path: Path, own: Shapes, *, optional: Iterable[str]) -> None:
    """Raise ModelError if the file at `path` is incomplete or does not hold exactly the tensors of `own`."""
    if not is_complete(path.parent):
        raise ModelError(f"weights in {path.parent} are incomplete")
    _compare(f"weights in {path}", read_header(path).tensors, own, optional=optional)


def check_shared(shared: SharedWeights, own: Shapes, *, optional: Iterable[str]) -> None:
    """Raise ModelError if the learner does not share exactly the tensors of `own`."""
    _compare("the weights that the learner shares", shared.entries(), own, optional=optional)


def check_adapter(folder: Path, own: Shapes, *, max_rank: int | None) -> None:
    """Raise ModelError if `folder` holds no complete LoRA adapter for a model of the shapes `own`.

    `max_rank` is the largest rank that is served; None: no adapter is.
    """
    if max_rank is None:
        raise ModelError(f"{folder} holds an adapter, but this engine serves none")
    if not is_complete(folder):
        raise ModelError(f"the adapter in {folder} is incomplete")
    config = read_json(folder / ADAPTER_CONFIG_FILE)
    rank, targets = config.get("r"), config.get("target_modules")
    extras = [name for name in PEFT_EXTRAS if config.get(name)]
    if config.get("peft_type") != "LORA" or extras or not isinstance(config.get("lora_alpha"), int | float):
        raise ModelError(f"{folder / ADAPTER_CONFIG_FILE} describes no plain LoRA adapter {extras or ''}".rstrip())
    if not isinstance(rank, int) or not 1 <= rank <= max_rank:
        raise ModelError(f"the adapter in {folder} is of rank {rank}: ranks from 1 to {max_rank} are served")
    if not isinstance(targets, list) or not targets:
        raise ModelError(f"{folder / ADAPTER_CONFIG_FILE} names no layers in target_modules")
    expected: dict[str, tuple[int, ...]] = {}  # by peft's rule: a target is a layer's name or its suffix
    for name, shape in own.items():
        layer = name.removesuffix(".weight")
        if len(shape) == 2 and layer != name and any(f".{layer}".endswith(f".{target}") for target in targets):
            expected[f"{PEFT_PREFIX}{layer}.lora_A.weight"] = (rank, shape[1])
            expected[f"{PEFT_PREFIX}{layer}.lora_B.weight"] = (shape[0], rank)
    path = folder / ADAPTER_FILE
    _compare(f"weights in {path}", read_header(path).tensors, expected, optional=())


def _compare(what: str, entries: Mapping[str, Any], own: Shapes, *, optional: Iterable[str]) -> None:
    """Raise ModelError if the tensors of a header are not exactly those of `own`, as floats."""
    found = {name: tuple(entry["shape"]) for name, entry in entries.items()}
    problems = (
        ("lacks", sorted(own.keys() - found.keys())),
        ("names unknown", sorted(found.keys() - own.keys() - set(optional))),
        ("has another shape of", sorted(name for name in own.keys() & found.keys() if own[name] != found[name])),
        ("has integers in", sorted(name for name, entry in entries.items() if entry["dtype"] not in FLOATS)),
    )
    for problem, names in problems:
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(f"{what} do not fit the model: the file {problem} {names[0]}{others}")
