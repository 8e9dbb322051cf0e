"""Checks of published weights by their header, and the update of a served transformers model, whole or its adapter.

An engine copies tensors one by one into the served model and cannot undo that. So a file that is truncated, has another
shape or lacks a tensor is refused before the first one is read. So are shared weights of the learner. A tied output
head is the embedding itself: a file may contain it or omit it.

An adapter is a folder in peft's format. It must change all the layers that it names, each by two matrices of the right
shapes (`models/adapter_folder.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ftis_node.errors import ModelError
from ftis_node.models import ModelSource
from ftis_node.models.adapter_folder import ADAPTER_FILE, AdapterSettings, check_fits, read_adapter
from ftis_node.models.loading import outlined_causal_lm, own_tensors, tied_names
from ftis_node.models.model_files import check_tensors, read_header
from ftis_node.models.quantized import quantized_shapes
from ftis_node.telemetry.log import quiet_library_logging
from ftis_node.workers.durable import is_complete
from ftis_node.workers.hub_names import hub_tensors
from ftis_node.workers.shared_tensors import OpenedWeights
from ftis_node.workers.tensor_file import LockedFiles, checksums_of, read_tensors
from ftis_node.workers.weight_store import SharedWeights

Shapes: TypeAlias = "Mapping[str, tuple[int, ...]]"


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
    """Return the model's tensors, without an adapter's, by the hub's names as views, and the names of tied ones."""
    return hub_tensors(model, own_tensors(model)), set(tied_names(model))


def model_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by the hub's names, before a quantization; a tied head is left out."""
    return _shapes(_own(model)[0]) | quantized_shapes(model)


def _shapes(own: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in own.items()}


def _copy(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    return checksums_of({name: tensor for name, tensor in own.items() if tensor.dtype == tensors[name].dtype})


def shapes_in(source: ModelSource) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Return the shapes that a learner of `source` publishes, by name, and the names that a file may have, too.

    The model decides: its own files may hold tensors that transformers ignores.
    """
    own, tied = _own(outlined_causal_lm(source))
    return _shapes(own), tied


def check_published(path: Path, own: Shapes, *, optional: Iterable[str]) -> None:
    """Raise ModelError if the file at `path` is incomplete or does not hold exactly the tensors of `own`."""
    if not is_complete(path.parent):
        raise ModelError(f"weights in {path.parent} are incomplete")
    check_tensors(f"weights in {path}", read_header(path).tensors, own, optional=optional)


def check_shared(shared: SharedWeights, own: Shapes, *, optional: Iterable[str]) -> None:
    """Raise ModelError if the learner does not share exactly the tensors of `own`."""
    check_tensors("the weights that the learner shares", shared.entries(), own, optional=optional)


def check_adapter(folder: Path, own: Shapes, *, max_rank: int | None) -> AdapterSettings:
    """Return the settings of an adapter. Raises ModelError if it is no complete one for a model of the shapes `own`.

    `max_rank` is the largest rank that is served; None: no adapter is.
    """
    if max_rank is None:
        raise ModelError(f"{folder} holds an adapter, but this engine serves none")
    if not is_complete(folder):
        raise ModelError(f"the adapter in {folder} is incomplete")
    settings = read_adapter(folder)
    if settings.rank > max_rank:
        raise ModelError(f"the adapter in {folder} is of rank {settings.rank}: ranks from 1 to {max_rank} are served")
    check_fits(folder, settings, own)
    return settings


class ServedAdapter:
    """The adapter of a transformers model, up to `max_rank` (None: none is served); without one the model is its base.

    peft adds it once, and later versions replace its values. The base is never written to. So if its file has the
    compute dtype, its tensors stay views of the mapped file. A learner of the same adapter on the same host maps the
    same pages, and the base is in memory once.
    """

    def __init__(self, model: Any, shapes: Shapes, *, max_rank: int | None) -> None:
        """`shapes` are those of the base's tensors by name."""
        self._model = model
        self._shapes = shapes
        self._max_rank = max_rank
        self._adapted: Any = None
        self._settings: AdapterSettings | None = None

    def load(self, folder: Path) -> dict[str, int]:
        """Serve the adapter in `folder`. Returns the checksums of its tensors in the model.

        Raises ModelError, with the model unchanged, for one that is incomplete, damaged or of another base.
        """
        settings = check_adapter(folder, self._shapes, max_rank=self._max_rank)
        tensors = read_tensors(folder / ADAPTER_FILE)
        with quiet_library_logging():
            from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

            if settings != self._settings:
                self.remove()
                config = LoraConfig(
                    r=settings.rank,
                    lora_alpha=settings.alpha,
                    target_modules=list(settings.targets),
                    task_type="CAUSAL_LM",
                    inference_mode=True,
                )
                self._adapted = get_peft_model(self._model, config, autocast_adapter_dtype=False).eval()
                self._settings = settings
            with torch.no_grad():
                set_peft_model_state_dict(self._adapted, tensors)
            held = get_peft_model_state_dict(self._adapted, save_embedding_layers=False)
        return checksums_of({name: held[name] for name, value in tensors.items() if held[name].dtype == value.dtype})

    def base_tensors(self) -> dict[str, Tensor]:
        """Return the base's tensors by the hub's names, as views."""
        return _own(self._model)[0]

    def remove(self) -> None:
        """Take the adapter away, so that the model is its base again."""
        if self._adapted is not None:
            self._adapted.unload()
        self._adapted = self._settings = None
