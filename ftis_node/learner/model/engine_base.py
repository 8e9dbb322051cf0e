"""An adapter's frozen base in the generation worker's memory: the learner computes from the engine's own tensors.

    engine  held_tensors --Exporter.share--> handles --daemon--> OpenedWeights --load_on_engine--> learner
            q, k, v of one joined map        (CUDA IPC)          its parameters are views, nothing is copied

Neither worker writes to the base. Before the first pass each tensor is compared with the model's file, in every bit.
A new process of the generator has another base, so the learner then starts again, too (`LearnerClient.renew`).

It has run on CPUs only, with shared memory instead of CUDA IPC (`tests/cpu_sharing.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ftis_node.errors import MachineError, ModelError, SharingError, WorkerTaskError
from ftis_node.learner.messages import LearnerBoot
from ftis_node.models import ModelSource, load_causal_lm, pick_device
from ftis_node.models.loading import check_finite, empty_causal_lm, tied_names
from ftis_node.models.model_files import check_tensors
from ftis_node.workers.shared_tensors import OpenedWeights
from ftis_node.workers.tensor_file import read_tensors

log = logging.getLogger(__name__)
COMPARED_BYTES = 64 << 20  # of a file's tensor on the device at once


def load_base(boot: LearnerBoot, source: ModelSource) -> Any:
    """Return the transformers model of `source`: on the engine's tensors if `boot` has their handles, else its own.

    If `boot` forbids a copy, raises WorkerTaskError if the handles cannot be opened, and MachineError if they cannot be
    used. Raises as `load_causal_lm` does.
    """
    problem = boot.base_refused
    if boot.base is not None:
        opened = OpenedWeights(torch.device(pick_device(boot.device)))
        try:
            opened.open(boot.base)
            return load_on_engine(source, opened, dtype=boot.dtype, device=boot.device)
        except SharingError as error:
            problem = str(error)
            if not opened.is_open and not boot.copies_base:  # the generator may have died: its next process has others
                raise WorkerTaskError(
                    f"the generator's copy of {boot.model_name} cannot be opened: {problem}"
                ) from error
    if problem and not boot.copies_base:
        raise MachineError(
            f"the learner cannot use the generator's copy of {boot.model_name} ({problem}), and two copies do not fit: "
            "give --quantize 4bit, or a smaller model"
        )
    if problem:
        log.warning("the learner loads its own copy of %s: %s", boot.model_name, problem)
    return load_causal_lm(source, dtype=boot.dtype, device=boot.device, quantize=boot.quantize)


def load_on_engine(source: ModelSource, opened: OpenedWeights, *, dtype: Any, device: Any) -> Any:
    """Return the frozen model of `source` in eval mode, whose parameters are the shared tensors of another process.

    Raises SharingError if they are not the tensors of the model's files in `dtype`.
    """
    place, kind = torch.device(pick_device(device)), getattr(torch, dtype)
    tensors = dict(opened.tensors())
    model = empty_causal_lm(source, dtype=kind)
    tied = tied_names(model)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    try:
        check_tensors("the generator's weights", opened.entries(), shapes, optional=tied)
    except ModelError as error:
        raise SharingError(str(error)) from error
    if wrong := sorted(name for name, value in tensors.items() if value.dtype != kind):
        raise SharingError(f"the generator holds {wrong[0]} in {tensors[wrong[0]].dtype}, not {kind}")
    _check_values(source, tensors)
    model.requires_grad_(False).load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(place)
    return model.eval()


def _check_values(source: ModelSource, tensors: Mapping[str, Tensor]) -> None:
    """Raise SharingError for a tensor that differs from the model's files, ModelError for one that is not finite."""
    unseen = dict(tensors)
    for path in source.weights_files:
        for name, stored in read_tensors(path).items():
            held = unseen.pop(name, None)
            if held is not None and not _is_equal(held, stored):
                check_finite(name, held, source.path)
                raise SharingError(f"the generator holds other values of {name} than the model's file")
    if unseen:
        raise SharingError(f"the model's files name {min(unseen)} in another way")


def _is_equal(held: Tensor, stored: Tensor) -> bool:
    num_rows = max(1, COMPARED_BYTES * len(held) // held.nbytes)
    parts = range(0, len(held), num_rows)
    return all(torch.equal(held[at : at + num_rows], stored[at : at + num_rows].to(held)) for at in parts)
