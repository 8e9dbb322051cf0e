"""What runs inside vLLM's own worker, beside the model: new weights for it.

vLLM mixes this class into its worker by name (`worker_extension_cls`), so it works the same whether the engine core is
in our process or in others, on one GPU or on many.

New weights go through vLLM's own in-place reload, which also knows sharding, fused layers and quantisation; on a CPU
there is a faster way for plain models (`vllm_cpu_weights`). vLLM's reload leaves one thing out on a CPU: the packed
copy of an output head that is tied to the embedding is not made again, so that the old head goes on serving (seen in
vLLM 0.32). It is packed again here.
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
    """Methods that the engine calls by name in every worker of vLLM's."""

    model_runner: Any
    reload_weights: Callable[..., None]  # the worker's own: the runner's alone knows no configuration of vLLM's
    ftis_direct: DirectLoader | None = None
    ftis_opened: OpenedWeights | None = None
    ftis_locked: LockedFiles | None = None

    def ftis_load(self, path: str, is_locked: bool = False) -> dict[str, int]:
        """Serve the tensors of a safetensors file, which was checked before. Returns as `Engine.load_weights`."""
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
        """Map the learner's tensors (`shared_weights.encode`). Returns why that cannot be done; "" where it was."""
        if self.ftis_opened is None:
            self.ftis_opened = OpenedWeights(self.model_runner.device)
        try:
            self.ftis_opened.open(decode(shared))
        except SharingError as error:
            return str(error)
        return ""

    def ftis_load_shared(self) -> dict[str, int]:
        """Serve what was mapped last, and unmap it: mapped memory would outlive a learner that dies.

        Returns as `Engine.load_weights`.
        """
        assert self.ftis_opened is not None, "nothing was mapped"
        try:
            return _reload(self, self.ftis_opened.tensors(), self.ftis_opened.entries())
        finally:
            self.ftis_opened.close()


def _reload(
    worker: WorkerExtension, tensors: Iterator[tuple[str, torch.Tensor]], entries: Mapping[str, Any]
) -> dict[str, int]:
    """Have vLLM put `tensors` in the place of its own. Returns the checksums of what it holds then."""
    model = worker.model_runner.get_model()
    logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)  # it warns of each tied or rotary layer, each time
    worker.reload_weights(weights_iterator=tensors)
    _pack_tied_head(model)
    if worker.model_runner.device.type != "cpu":
        torch.accelerator.synchronize()  # what was read is the learner's to change from here on
        torch.accelerator.empty_cache()  # of the largest layer's copy, which the memory plan has no room for
    return held_checksums(model, entries)


def _pack_tied_head(model: Any) -> None:
    """Pack the output head again where it is tied to the embedding and has a packed copy, which only CPUs have."""
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(head, "cpu_linear", None) is not None:
        head.quant_method.process_weights_after_loading(head)
