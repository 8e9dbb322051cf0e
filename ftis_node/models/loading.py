"""Load a causal language model, the same way in every process, and export it.

Nothing from the model's folder is executed (`trust_remote_code=False`, safetensors only). A folder whose weights do not
fill the model is an error: transformers would fill the gaps with random numbers and only warn.

For a model that several processes share, `empty_causal_lm` makes its modules without the memory of parameters. The
model's code makes the buffers, because some are in no file (rotary frequencies).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from ftis_node.config.workers import Quantize
from ftis_node.errors import ConfigError, ModelError, first_line
from ftis_node.models.accelerators import Device, pick_device
from ftis_node.models.quantized import check_dense, loading_arguments, use_stored_codes
from ftis_node.models.source import GENERATION_CONFIG_FILE, ModelSource
from ftis_node.models.tokenizer import PromptTokenizer
from ftis_node.telemetry.log import quiet_library_logging

if TYPE_CHECKING:
    import torch

Dtype = Literal["auto", "float32", "bfloat16"]
FILE_MODE = 0o644
# Layer types of transformers' configurations whose state is not one key and value for each token.
RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent"})


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
                    config, dtype=dtype, attn_implementation=_attention_of(config), trust_remote_code=False
                )
            model.tie_weights()
            if (source.folder / GENERATION_CONFIG_FILE).exists():
                model.generation_config = GenerationConfig.from_pretrained(source.folder, local_files_only=True)
        except Exception as error:
            raise ModelError(f"the model in {source.folder} cannot be built: {_reason(error)}") from error
    return model.eval()


def outlined_causal_lm(source: ModelSource) -> Any:
    """Return the model of `load_causal_lm` without values: all tensors are on the meta device, in float32.

    It reads only the headers of the weights' files, and knows by them how the files name its tensors. Tensors that the
    model lacks are ignored. Raises ModelError as `empty_causal_lm` does.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar

    empty = empty_causal_lm(source, dtype=torch.float32)
    tensors = {name: torch.empty(shape, device="meta") for name, shape in source.weight_shapes.items()}
    with quiet_library_logging():
        disable_progress_bar()
        try:
            return type(empty).from_pretrained(
                None, config=empty.config, state_dict=tensors, dtype=torch.float32, device_map="meta"
            )
        finally:
            enable_progress_bar()


def load_causal_lm(
    source: ModelSource, *, dtype: Dtype = "auto", device: Device = "cpu", quantize: Quantize = "none"
) -> Any:
    """Return the model of `source` as a transformers model in eval mode, with the attention of `_attention_of`.

    An adapter is merged. `dtype` "auto" keeps the type of the saved weights. With `quantize` the layers' linear maps
    have 4 bits (`quantized.py`); then `dtype` is not "auto". Raises ModelError if the weights are damaged, not finite,
    or do not fit the configuration. Raises MachineError if `device` is "cuda" and there is none, or bitsandbytes is
    missing.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar

    target = pick_device(device)
    how = {}
    if quantize != "none":
        check_dense(source)
        how = loading_arguments(dtype=getattr(torch, dtype), device=target)
    with quiet_library_logging():
        disable_progress_bar()
        try:
            config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False, local_files_only=True)
            model, report = AutoModelForCausalLM.from_pretrained(
                source.folder,
                config=config,
                dtype=dtype,
                attn_implementation=_attention_of(config),
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # checked below, so that the error names the tensor
                output_loading_info=True,
                **how,
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ModelError(f"the model in {source.folder} cannot be loaded: {_reason(error)}") from error
        finally:
            enable_progress_bar()
    if report["mismatched_keys"]:
        first = min(str(key[0]) for key in report["mismatched_keys"])
        raise ModelError(f"the weights in {source.folder} do not have the shapes of its config.json: {first}")
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"the weights in {source.folder} lack {len(missing)} tensors of the model, first {missing[0]}")
    if quantize == "none":
        model = model.to(target)
    use_stored_codes(model)
    if source.adapter is not None:
        model = _merged(model, source.adapter)
    for name, value in model.named_parameters():
        state = getattr(value, "quant_state", None)
        check_finite(name, value.detach() if state is None else state.absmax, source.path)
    return model.eval()


def _attention_of(config: Any) -> str | None:
    """Return the attention that transformers must use for `config`; None: its choice, SDPA if the model has it.

    SDPA ignores a soft cap on attention scores, without an error.
    """
    return "eager" if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) else None


def is_recurrent(causal_lm: Any) -> bool:
    """Return whether a layer of a transformers model has a state that depends on all tokens before."""
    layer_types = getattr(causal_lm.config.get_text_config(decoder=True), "layer_types", None) or ()
    return bool(causal_lm._is_stateful or RECURRENT_LAYERS & set(layer_types))


def _reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it needs code from its folder, which is never run"
    return first_line(error)


def check_finite(name: str, value: torch.Tensor, where: Path) -> None:
    """Raise ModelError for NaN or infinite weights. The sum is finite unless one is, or all are absurdly large."""
    import torch

    if not value.is_floating_point():
        return
    total = value.sum(dtype=torch.promote_types(value.dtype, torch.float32))
    if not total.isfinite() and not value.isfinite().all():
        raise ModelError(f"{where}: the tensor {name} has NaN or infinite weights: get the model again")


def _merged(model: Any, adapter: Path) -> Any:
    with quiet_library_logging():
        from peft import PeftModel

        try:
            return PeftModel.from_pretrained(model, adapter).merge_and_unload()
        except Exception as error:
            raise ModelError(f"the adapter in {adapter} cannot be loaded: {first_line(error)}") from error


@contextmanager
def merged_source(source: ModelSource, *, dtype: Dtype) -> Iterator[ModelSource]:
    """Yield `source`; if it is an adapter, a model in a temporary folder with the adapter merged."""
    if source.adapter is None:
        yield source
        return
    with TemporaryDirectory(prefix="ftis-merged-") as folder, quiet_library_logging():
        model = load_causal_lm(source, dtype=dtype)
        given = model.generation_config
        model.generation_config = type(given)()
        model.save_pretrained(folder)
        _save_generation_config(given, Path(folder))
        yield replace(source.base, name=source.name, folder=Path(folder))


def export_model(
    model: Any, tokenizer: PromptTokenizer, out: Path, *, dtype: torch.dtype, write: Callable[[Path], None]
) -> None:
    """Write configurations and tokenizer of `model` to `out`. Raises ConfigError if that is no empty folder.

    `write` puts the weights there as safetensors of `dtype`; it may omit a tied output head.
    """
    with _whole_folder(out) as folder:
        write(folder)
        config = type(model.config).from_dict(model.config.to_dict())
        config.dtype = dtype
        config.save_pretrained(folder)
        _save_generation_config(model.generation_config, folder)
        tokenizer.save(folder)


def _save_generation_config(config: Any, folder: Path) -> None:
    """Write `config` as it is. Its own `save_pretrained` refuses values that models on the hub have."""
    config.to_json_file(folder / GENERATION_CONFIG_FILE, keys_to_pop=["compile_config"])


def export_adapter(adapted_model: Any, tokenizer: PromptTokenizer, out: Path) -> None:
    """Write the LoRA adapter of a peft model, and the tokenizer. Raises ConfigError as `export_model` does."""
    with _whole_folder(out) as folder:
        # "auto" would ask the hub whether the embedding was resized; adapters here never touch it.
        adapted_model.save_pretrained(folder, save_embedding_layers=False)
        tokenizer.save(folder)


def tied_names(model: Any) -> frozenset[str]:
    """Return the names of tensors that alias another tensor of the model, such as a tied output head."""
    return frozenset(model.all_tied_weights_keys)


def own_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's tensors under the names of a model without adapter, unmerged; tied weights appear once."""
    left_out = tied_names(model)
    return {
        name.replace(".base_layer.", "."): value
        for name, value in model.state_dict().items()
        if ".lora_" not in name and name not in left_out
    }


def check_new_or_empty(out: Path) -> Path:
    """Return the absolute path of `out`, without links. Raises ConfigError for a file, and for a folder with files."""
    out = out.expanduser().resolve()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder: choose another with --out")
    return out


def check_export_folder(out: Path) -> Path:
    """Return the absolute path of `out`, without links. Raises ConfigError if no folder can replace what is there."""
    out = check_new_or_empty(out)
    if out.exists() and (out.samefile(os.curdir) or out.is_mount()):
        raise ConfigError(f"{out} is the current folder or a mount point: choose another with --out")
    parent = next(path for path in out.parents if os.path.exists(path))
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise ConfigError(f"{parent} is no folder that you can write to: choose another with --out")
    return out


@contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out` and rename it at the end, so that only a complete one has its name."""
    out = check_export_folder(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        yield partial
        for file in filter(Path.is_file, partial.rglob("*")):
            file.chmod(FILE_MODE)  # another user may serve the model
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
