"""Load a causal language model, the same way in every process.

Nothing from the model's folder is executed (`trust_remote_code=False`, safetensors only). A folder whose weights do not
fill the model is an error: transformers would fill the gaps with random numbers and only warn.

A model without its weights, and single rows of its weights from its files: for a model that several processes share.

    empty_causal_lm   modules and buffers as they are, parameters without memory (torch's meta device)
    WeightRows        rows start to end of a parameter, read from the file that holds it

So each process reads only the rows that it holds. The model's code makes the buffers, because some are in no file
(rotary frequencies).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ftis_node.errors import MachineError, ModelError
from ftis_node.models.devices import has_gpu
from ftis_node.models.library_logging import quiet_library_logging
from ftis_node.models.safetensors_file import read_header

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from ftis_node.models.source import ModelSource

Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
GENERATION_CONFIG_FILE = "generation_config.json"
READABLE = {"F64", "F32", "F16", "BF16"}  # safetensors' names of number formats


def empty_causal_lm(source: ModelSource, *, dtype: torch.dtype) -> Any:
    """Return the model of `load_causal_lm` in `dtype`, with all parameters on the meta device and tied ones tied.

    Raises ModelError if the configuration describes no model.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    with quiet_library_logging():
        try:
            config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False, local_files_only=True)
            with init_empty_weights(include_buffers=False):
                model = AutoModelForCausalLM.from_config(
                    config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
                )
            model.tie_weights()
            if (source.folder / GENERATION_CONFIG_FILE).exists():
                model.generation_config = GenerationConfig.from_pretrained(source.folder, local_files_only=True)
        except Exception as error:
            raise ModelError(f"the model in {source.folder} cannot be built: {first_line(error)}") from error
    return model.eval()


class WeightRows:
    """The tensors in a model's files, by name. Between two reads no file is open and no tensor in memory."""

    def __init__(self, source: ModelSource) -> None:
        """Read the headers. Raises ModelError if a file is damaged."""
        self._where: dict[str, tuple[Path, dict[str, Any]]] = {
            name: (path, entry) for path in source.weights_files for name, entry in read_header(path).tensors.items()
        }

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def why_not(self, model: Any) -> str:
        """Return why the files cannot fill `model` tensor by tensor; empty if they can."""
        shapes = {name: value.shape for name, value in model.named_parameters()}
        shapes |= {name: value.shape for name, value in model.named_buffers() if name in model.state_dict()}
        for name, shape in shapes.items():
            _, entry = self._where.get(name, (None, None))
            if entry is None:
                return f"{name} is not in its files"
            if tuple(entry["shape"]) != tuple(shape) or entry["dtype"] not in READABLE:
                return f"{name} is {entry['dtype']} {entry['shape']} in its file"
        if twice := sorted(name for name in model.all_tied_weights_keys if name in self._where):
            return f"{twice[0]} is a tied tensor, but its files have it too"
        if model._keep_in_fp32_modules_strict:
            return "parts of it are float32 in any case"
        return ""

    def read(self, name: str, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Return rows `start` to `end` (all unless given) of a tensor, in the file's number format, on the CPU."""
        from safetensors import safe_open

        path, entry = self._where[name]
        with safe_open(path, framework="pt") as file:
            if not entry["shape"]:
                scalar: torch.Tensor = file.get_tensor(name).clone()
                return scalar
            rows: torch.Tensor = file.get_slice(name)[start:end].clone()
        return rows


def load_causal_lm(source: ModelSource, *, dtype: Dtype = "auto", device: Device = "cpu") -> Any:
    """Return the model of `source` as a transformers model in eval mode, with scaled-dot-product attention.

    `dtype` "auto" keeps the type of the saved weights. Raises ModelError if the weights are damaged or do not fit the
    configuration. Raises MachineError if `device` is "cuda" and there is none.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar

    target = pick_device(device)
    with quiet_library_logging():
        disable_progress_bar()
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                source.folder,
                dtype=dtype,
                attn_implementation="sdpa",
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # checked below, so that the error names the tensor
                output_loading_info=True,
            )
        except Exception as error:
            raise ModelError(f"the model in {source.folder} cannot be loaded: {first_line(error)}") from error
        finally:
            enable_progress_bar()
    _check_complete(source, report)
    return model.to(target).eval()


def pick_device(device: Device) -> Literal["cpu", "cuda"]:
    """Return `device` as torch names it; "auto" is the GPU if there is one. Raises MachineError for a missing GPU."""
    if device == "cpu":
        return "cpu"
    if has_gpu():
        return "cuda"
    if device == "cuda":
        raise MachineError("no CUDA device here: use --device cpu, or see `ftis-node doctor`")
    return "cpu"


def _check_complete(source: ModelSource, report: Any) -> None:
    missing = sorted(report["missing_keys"])
    mismatched = sorted(str(key[0]) for key in report["mismatched_keys"])
    if mismatched:
        raise ModelError(f"the weights in {source.folder} do not have the shapes of its config.json: {mismatched[0]}")
    if missing:
        raise ModelError(f"the weights in {source.folder} lack {len(missing)} tensors of the model, first {missing[0]}")


def first_line(error: Exception) -> str:
    """Return the first line of an error's text; the name of its type if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
