"""The extension of vLLM's own worker that loads new weights in the process of the model.

vLLM mixes this class into its worker by name (`worker_extension_cls`). So it works the same with the engine core in
this process or in others, on one GPU or on many.

New weights go through vLLM's own in-place reload, which also supports sharding, fused layers and quantization. On a CPU
plain models have a faster loader (`vllm_cpu_weights`). On a CPU vLLM's reload does not repack an output head that is
tied to the embedding. The old head then stays in use (seen in vLLM 0.32). This module repacks it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ftis_node.errors import SharingError
from ftis_node.generation.engines.vllm_cpu_weights import DirectLoader, held_checksums, plan
from ftis_node.models import read_header
from ftis_node.workers.weights.page_locked import LockedFiles
from ftis_node.workers.weights.shared_tensors import OpenedWeights
from ftis_node.workers.weights.shared_weights import decode
from ftis_node.workers.weights.tensor_file import read_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


class WorkerExtension:
    """A mix-in: methods that the engine calls by name in every worker of vLLM."""

    model_runner: Any
    reload_weights: Callable[..., None]  # the worker's own: the runner's lacks vLLM's configuration
    ftis_direct: DirectLoader | None = None
    ftis_opened: OpenedWeights | None = None
    ftis_locked: LockedFiles | None = None

    def ftis_load(self, path: str, is_locked: bool = False) -> dict[str, int]:
        """Serve the tensors of a validated safetensors file. Returns the same as `Engine.load_weights`."""
        file, model = Path(path), self.model_runner.get_model()
        if self.model_runner.device.type == "cpu" and self.ftis_direct is None:
            self.ftis_direct = plan(model, file)
        if self.ftis_direct is not None:
            read = self.ftis_direct.load(file)
            _pack_tied_head(model)
            return read | held_checksums(model, read_header(file).tensors)
        if is_locked and self.ftis_locked is None:
            self.ftis_locked = LockedFiles()
        tensors = read_tensors(file, locked=self.ftis_locked if is_locked else None)
        return _reload(self, iter(tensors.items()), read_header(file).tensors)

    def ftis_open(self, shared: bytes) -> str:
        """Map the learner's tensors (`shared_weights.encode`). Returns the reason of a failure, "" after success."""
        if self.ftis_opened is None:
            self.ftis_opened = OpenedWeights(self.model_runner.device)
        try:
            self.ftis_opened.open(decode(shared))
        except SharingError as error:
            return str(error)
        return ""

    def ftis_load_shared(self) -> dict[str, int]:
        """Serve the mapped tensors, and unmap them: mapped memory would stay allocated after a learner's death.

        Returns the same as `Engine.load_weights`.
        """
        assert self.ftis_opened is not None, "nothing was mapped"
        try:
            return _reload(self, self.ftis_opened.tensors(), self.ftis_opened.entries())
        finally:
            self.ftis_opened.close()


def _reload(
    worker: WorkerExtension, tensors: Iterator[tuple[str, torch.Tensor]], entries: Mapping[str, Any]
) -> dict[str, int]:
    """Replace vLLM's tensors by `tensors`, with its own reload. Returns the checksums of the tensors that it then
    holds.
    """
    model = worker.model_runner.get_model()
    logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)  # it warns of each tied or rotary layer at every load
    worker.reload_weights(weights_iterator=tensors)
    _pack_tied_head(model)
    if worker.model_runner.device.type != "cpu":
        torch.accelerator.synchronize()  # after this the learner may change the shared tensors
        torch.accelerator.empty_cache()  # free the copy of the largest layer, which the memory plan does not include
    return held_checksums(model, entries)


def _pack_tied_head(model: Any) -> None:
    """Repack the output head if it is tied to the embedding and has a packed copy, which exists only on CPUs."""
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(head, "cpu_linear", None) is not None:
        head.quant_method.process_weights_after_loading(head)
