"""Load a causal language model, the same way in every process.

Nothing from the model's folder is executed (`trust_remote_code=False`, safetensors only). A folder whose weights do not
fill the model is an error: transformers would fill the gaps with random numbers and only warn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ftis_node.errors import MachineError, ModelError
from ftis_node.models.devices import has_gpu
from ftis_node.models.library_logging import quiet_library_logging

if TYPE_CHECKING:
    from ftis_node.models.source import ModelSource

Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]


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
