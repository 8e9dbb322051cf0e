"""The extension of vLLM's own worker that loads new weights in the process of the model.

New weights go through vLLM's own in-place reload, which also supports sharding, fused layers and quantization. Plain
models on a CPU have a faster loader (`DirectLoader`). In both cases a proof of the weights follows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch

from ftis_node.errors import SharingError
from ftis_node.models.safetensors_file import read_header
from ftis_node.workers.shared_tensors import OpenedWeights
from ftis_node.workers.shared_weights import decode
from ftis_node.workers.tensor_file import LockedFiles, checksum, checksums_of, read_tensors

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class TensorTarget:
    """One parameter of a module, and the file's tensors that form it, in order; `shape` is that of all together."""

    module: Any
    parameter: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    is_packed: bool


class DirectLoader:
    """A weight loader for a model on a CPU. It reads a file once, directly to the packed layers.

    On a CPU vLLM keeps linear layers only in a form packed for oneDNN. Its own reload allocates every layer, fills it
    from a mapped file and packs it, in fresh memory each time. Here the file's bytes go straight into the model's own
    tensors. Those of packed layers go into one scratch buffer of the size of the largest, and are packed from there.
    The parts of a fused layer (`qkv_proj`, `gate_up_proj`) are stored one below the other: sequential reads fuse them.
    """

    def __init__(self, targets: Sequence[TensorTarget], dtype: torch.dtype) -> None:
        self._targets = targets
        num_values = max((prod(target.shape) for target in targets if target.is_packed), default=0)
        self._scratch = torch.empty(num_values, dtype=dtype)

    def load(self, path: Path) -> dict[str, int]:
        """Read the validated file at `path`. Raises ModelError, OSError, EOFError.

        Returns the checksums of the bytes that it read.
        """
        header = read_header(path)
        checksums = {}
        with path.open("rb", buffering=0) as file:
            for target in self._targets:
                values = self._scratch[: prod(target.shape)] if target.is_packed else _own_values(target)
                filled = 0
                for name in target.names:
                    start, end = header.tensors[name]["data_offsets"]
                    file.seek(header.data_start + start)
                    part = values.view(torch.uint8)[filled : filled + end - start]
                    filled += _read_into(file, part)
                    checksums[name] = checksum(part)
                if target.is_packed:
                    _pack(target.module, values.view(target.shape))
        return checksums


def plan(model: Any, path: Path) -> DirectLoader | None:
    """Return a loader for files such as `path` into `model`; None if only vLLM itself can load them.

    Those are sharded and quantized models, adapters, and files with other names.
    """
    entries = read_header(path).tensors
    dtypes = {DTYPES.get(entry["dtype"]) for entry in entries.values()}
    if len(dtypes) != 1 or (dtype := dtypes.pop()) is None:
        return None
    targets = list(_targets(model, entries))
    used = [name for target in targets for name in target.names]
    if len(used) != len(set(used)) or set(used) != entries.keys() - {HEAD} | set(used):
        return None
    return DirectLoader(targets, dtype) if _fits(model, targets, dtype) else None


def held_checksums(model: Any, entries: Mapping[str, Any]) -> dict[str, int]:
    """Return checksums of the header's tensors that `model` holds in published form, computed from the model's own
    memory.

    Packed, converted, sharded and quantized layers are omitted. So are models without `packed_modules_mapping`, because
    their linear layers may be the transposes of the file's (GPT-2).
    """
    held: dict[str, torch.Tensor] = {}
    for target in _targets(model, entries) if getattr(model, "packed_modules_mapping", None) else ():
        value = getattr(target.module, target.parameter)
        if target.is_packed or not _is_plain(target) or not _is_whole(value, target):
            continue
        rows = [entries[name]["shape"][0] for name in target.names]
        parts = zip(target.names, value.data[: sum(rows)].split(rows), strict=True)
        held |= {name: part for name, part in parts if DTYPES.get(entries[name]["dtype"]) == value.dtype}
    return checksums_of(held)


def _targets(model: Any, entries: Mapping[str, Any]) -> Iterator[TensorTarget]:
    """Yield every parameter for which the file has tensors. A tied head, which is the embedding, appears only once."""
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        for parameter, _ in module.named_parameters(recurse=False):
            parts = [".".join(filter(None, (parent, part, parameter))) for part in fused.get(leaf, [leaf])]
            if all(name in entries for name in parts):
                shapes = [tuple(entries[name]["shape"]) for name in parts]
                shape = (sum(each[0] for each in shapes), *shapes[0][1:])
                is_packed = parameter == "weight" and hasattr(module, "cpu_linear") and leaf != "embed_tokens"
                yield TensorTarget(module, parameter, tuple(parts), shape, is_packed)


def _fits(model: Any, targets: Sequence[TensorTarget], dtype: torch.dtype) -> bool:
    """Return whether the targets are complete, and each is a plain, unsharded layer of the file's type."""
    covered = {id(getattr(target.module, target.parameter)) for target in targets}
    if any(id(value) not in covered for _, value in model.named_parameters()):
        return False
    for target in targets:
        value = getattr(target.module, target.parameter)
        whole = target.is_packed or (value.dtype == dtype and value.is_contiguous() and _is_whole(value, target))
        if not _is_plain(target) or not whole:
            return False
    return True


def _is_plain(target: TensorTarget) -> bool:
    """Return whether the layer is not quantized."""
    method = getattr(target.module, "quant_method", None)
    return method is None or type(method).__name__.startswith("Unquantized")


def _is_whole(value: torch.Tensor, target: TensorTarget) -> bool:
    """Return whether a parameter can hold the full tensor of the file; a vocabulary may be padded to more rows."""
    return tuple(value.shape[1:]) == target.shape[1:] and value.shape[0] >= target.shape[0]


def _read_into(file: FileIO, target: torch.Tensor) -> int:
    view = target.numpy().data
    while view:
        if not (count := file.readinto(view)):
            raise EOFError("the weight file ends too early")
        view = view[count:]
    return target.numel()


def _own_values(target: TensorTarget) -> torch.Tensor:
    """Return the rows of the model's own contiguous tensor that the file fills, as a flat view."""
    own: torch.Tensor = getattr(target.module, target.parameter).data
    return own[: target.shape[0]].view(-1)


def _pack(module: Any, values: torch.Tensor) -> None:
    """Pack `values` for a linear layer. They are overwritten afterwards."""
    module.weight = torch.nn.Parameter(values, requires_grad=False)
    module.quant_method.process_weights_after_loading(module)
    if module.weight.numel():  # it is not packed: the model reads it in this form
        module.weight = torch.nn.Parameter(values.clone(), requires_grad=False)


class WorkerExtension:
    """Methods that the engine calls by name in every worker of vLLM, which mixes them in (`worker_extension_cls`)."""

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
    if worker.model_runner.device.type == "cpu":
        _forget_packed_experts(model)
    worker.reload_weights(weights_iterator=tensors)
    _pack_tied_head(model)
    if worker.model_runner.device.type != "cpu":
        torch.accelerator.synchronize()  # after this the learner may change the shared tensors
        torch.accelerator.empty_cache()  # free the copy of the largest layer, which the memory plan does not include
    return held_checksums(model, entries)


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
