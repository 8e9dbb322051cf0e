"""The extension of vLLM's own worker that loads new weights in the process of the model.

New weights go through vLLM's own in-place reload, which also supports sharding, fused layers and quantization. A proof
of the weights follows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from ftis_node.errors import SharingError
from ftis_node.models.model_files import read_header
from ftis_node.workers.shared_tensors import Exporter, OpenedWeights
from ftis_node.workers.tensor_file import NAMES, LockedFiles, checksums_of, read_tensors
from ftis_node.workers.weight_store import SharedWeights

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


class WorkerExtension:
    """Methods that the engine calls by name in every worker of vLLM, which mixes them in (`worker_extension_cls`)."""

    model_runner: Any
    reload_weights: Callable[..., None]  # the worker's own: the runner's lacks vLLM's configuration
    ftis_opened: OpenedWeights | None = None
    ftis_locked: LockedFiles | None = None
    ftis_exporter: Exporter | None = None

    def ftis_load(self, path: str, is_locked: bool = False) -> dict[str, int]:
        """Serve the tensors of a validated safetensors file. Returns the same as `Engine.load_weights`."""
        if is_locked and self.ftis_locked is None:
            self.ftis_locked = LockedFiles()
        tensors = read_tensors(Path(path), locked=self.ftis_locked if is_locked else None)
        return _reload(self, iter(tensors.items()), read_header(Path(path)).tensors)

    def ftis_open(self, shared: bytes) -> str:
        """Map the learner's tensors (`SharedWeights`). Returns the reason of a failure, "" after success."""
        if self.ftis_opened is None:
            self.ftis_opened = OpenedWeights(self.model_runner.device)
        try:
            self.ftis_opened.open(msgspec.msgpack.decode(shared, type=SharedWeights))
        except SharingError as error:
            return str(error)
        return ""

    def ftis_share(self, shapes: Mapping[str, Sequence[int]]) -> bytes | str:
        """Return the encoded `SharedWeights` of an adapter's base, or the reason why the engine cannot share it.

        `shapes` are those of the base's tensors by name. Parts of joined maps are views of them.
        """
        dtype = NAMES.get(self.model_runner.model_config.dtype)
        entries = {name: {"dtype": dtype, "shape": shape} for name, shape in shapes.items()}
        held = held_tensors(self.model_runner.get_model(), entries)
        if missing := sorted(entries.keys() - held.keys()):
            return f"vLLM holds {len(missing)} of {len(entries)} tensors in another form, such as {missing[0]}"
        if self.ftis_exporter is None:
            self.ftis_exporter = Exporter()
        try:
            return msgspec.msgpack.encode(self.ftis_exporter.share(held))
        except SharingError as error:
            return str(error)

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
    """Replace vLLM's tensors by `tensors`. Returns the checksums of the tensors that it then holds."""
    model = worker.model_runner.get_model()
    logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)  # it warns of each tied or rotary layer at every load
    if worker.model_runner.device.type == "cpu":
        _forget_packed_experts(model)
    worker.reload_weights(weights_iterator=tensors)
    _pack_tied_head(model)
    if worker.model_runner.device.type != "cpu":
        torch.accelerator.synchronize()  # after this the learner may change the shared tensors
        torch.accelerator.empty_cache()  # free the copy of the largest layer, which the memory plan does not include
    return checksums_of(held_tensors(model, entries))


def held_tensors(model: Any, entries: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the header's tensors that `model` holds in published form, as views of the model's own memory.

    Packed, converted, sharded and quantized layers are omitted. So are models without `packed_modules_mapping`, because
    their linear layers may be the transposes of the file's (GPT-2). A tied head, which is the embedding, appears once.
    A layer with an adapter is the `base_layer` of vLLM's layer.
    """
    held: dict[str, torch.Tensor] = {}
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or {}
    for path, module in model.named_modules() if fused else ():
        parent, _, leaf = path.removesuffix(".base_layer").rpartition(".")
        method = getattr(module, "quant_method", None)
        if method is not None and not type(method).__name__.startswith("Unquantized"):
            continue
        for parameter, value in module.named_parameters(recurse=False):
            names = [".".join(filter(None, (parent, part, parameter))) for part in fused.get(leaf, [leaf])]
            is_packed = parameter == "weight" and hasattr(module, "cpu_linear") and leaf != "embed_tokens"
            if is_packed or not all(name in entries for name in names):
                continue
            rows = [entries[name]["shape"][0] for name in names]
            # A vocabulary may be padded to more rows, and a shard has fewer.
            if list(value.shape[1:]) == list(entries[names[0]]["shape"][1:]) and len(value) >= sum(rows):
                parts = zip(names, value.data[: sum(rows)].split(rows), strict=True)
                held |= {name: part for name, part in parts if entries[name]["dtype"] == NAMES.get(value.dtype)}
    return held


def _forget_packed_experts(model: Any) -> None:
    """Make the next reload pack fused experts again: vLLM packs them for a CPU only once, at the first load (0.32)."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def _pack_tied_head(model: Any) -> None:
    """Repack an output head that is tied to the embedding and has a packed copy, which exists only on CPUs.

    vLLM's reload does not, and the old head would stay in use (seen in vLLM 0.32). A model without `lm_head` (Gemma 2)
    uses its embedding as the head.
    """
    embeddings = [module for module in model.modules() if hasattr(module, "num_embeddings")]
    for head in [model.lm_head] if hasattr(model, "lm_head") else embeddings:
        if getattr(head, "cpu_linear", None) is not None:
            head.quant_method.process_weights_after_loading(head)
