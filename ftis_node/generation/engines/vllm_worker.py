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

from ftis_node.generation.engines.vllm_cpu_weights import DirectLoader, held_checksums, plan
from ftis_node.ipc.tensor_file import read_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


class WorkerExtension:
    """Methods that the engine calls by name in every worker of vLLM's."""

    model_runner: Any
    reload_weights: Callable[..., None]  # the worker's own: the runner's alone knows no configuration of vLLM's
    ftis_direct: DirectLoader | None = None

    def ftis_load(self, path: str) -> dict[str, int]:
        """Serve the tensors of a safetensors file, which was checked before. Returns as `Engine.load_weights`."""
        model, is_on_cpu = self.model_runner.get_model(), self.model_runner.device.type == "cpu"
        if is_on_cpu and self.ftis_direct is None:
            self.ftis_direct = plan(model, Path(path))
        read: dict[str, int] = {}
        if self.ftis_direct is not None:
            read = self.ftis_direct.load(Path(path))
        else:
            logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)  # it warns of each tied or rotary layer, each time
            self.reload_weights(weights_iterator=iter(read_tensors(Path(path)).items()))
        _pack_tied_head(model)
        if not is_on_cpu:
            torch.accelerator.empty_cache()  # of the largest layer's copy, which the memory plan has no room for
        return read | held_checksums(model, Path(path))


def _pack_tied_head(model: Any) -> None:
    """Pack the output head again where it is tied to the embedding and has a packed copy, which only CPUs have."""
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(head, "cpu_linear", None) is not None:
        head.quant_method.process_weights_after_loading(head)
