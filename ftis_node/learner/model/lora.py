"""The LoRA adapter of a model in training: added by peft, drawn or read from a folder, merged for publication."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ftis_node.config.workers import LoraSection
from ftis_node.errors import ConfigError, ModelError
from ftis_node.learner.distributed.sharded_tensors import is_sharded
from ftis_node.models.adapter_folder import ADAPTER_FILE, read_adapter
from ftis_node.models.loading import check_finite
from ftis_node.telemetry.log import quiet_library_logging
from ftis_node.workers.tensor_file import read_tensors

log = logging.getLogger(__name__)
ADAPTER = "default"  # peft's default adapter name.
ADAPTED_LAYERS = "all-linear"  # peft's word for all linear layers but the output head


def add_adapter(causal_lm: Any, lora: LoraSection, *, start: Path | None = None) -> Any:
    """Add a LoRA adapter to `causal_lm`, in its number format, on the layers of the adapter in `start` if there is one.

    Returns peft's wrapper. Raises ConfigError.
    """
    with quiet_library_logging():
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=0.0,  # or the two passes over a batch would not see the same model
            target_modules=list(read_adapter(start).targets) if start else _layers_of(causal_lm),
            task_type="CAUSAL_LM",
        )
        try:
            return get_peft_model(causal_lm, config, autocast_adapter_dtype=False).eval()
        except ValueError as error:
            raise ConfigError(f"the LoRA adapter does not fit the model: {error}") from error


def _layers_of(causal_lm: Any) -> list[str] | str:
    """Return the layers that get an adapter: all linear ones, but in blocks with experts none.

    Adapters of fused experts have names that vLLM and older releases of peft do not know.
    """
    fused = [name for name, value in causal_lm.named_parameters() if ".experts." in name and value.ndim > 2]
    if not fused:
        return ADAPTED_LAYERS
    blocks = {name.partition(".experts.")[0].rpartition(".")[2] for name in fused}
    head = causal_lm.get_output_embeddings()
    linear = [name for name, layer in causal_lm.named_modules() if isinstance(layer, nn.Linear) and layer is not head]
    names = sorted({name.rpartition(".")[2] for name in linear if not blocks & set(name.split("."))})
    log.info("the adapter changes the layers %s, and no experts", ", ".join(names))
    return names


def fuse_adapters(causal_lm: Any) -> None:
    """Let the adapters of plain and of 4-bit linear layers add their output as part of their last product.

    peft scales and adds it in two more passes over the layer's output, and rounds it three times.
    """
    for layer in lora_layers(causal_lm).values():
        is_4_bit = hasattr(layer.base_layer.weight, "quant_state")  # bitsandbytes may be missing
        if type(layer.base_layer) is nn.Linear or is_4_bit:
            layer.forward = MethodType(_forward, layer)  # one function for all layers, so that it compiles once


def _forward(layer: Any, hidden: Tensor) -> Tensor:
    flat = hidden.flatten(0, -2)  # first: a write to a view of the output would copy its gradient
    output: Tensor = layer.base_layer(flat)
    if not layer.disable_adapters:
        output.addmm_(layer.lora_A[ADAPTER](flat), layer.lora_B[ADAPTER].weight.T, alpha=layer.scaling[ADAPTER])
    return output.view(*hidden.shape[:-1], output.shape[-1])


def lora_layers(causal_lm: Any) -> dict[str, Any]:
    """Return the layers with an adapter, by their names in the model."""
    if "peft" not in sys.modules:  # which a model with an adapter has loaded; it takes a second of processor time
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in causal_lm.named_modules() if isinstance(module, LoraLayer)}


@torch.no_grad()
def initialize_adapter(causal_lm: Any) -> None:
    """Draw the adapter's first weights. Those beside a meta weight, which peft leaves on the meta device, get memory.

    They are those of a new linear layer on the CPU in float32, as peft's are, and zeros. So all ranks draw the same
    weights, and so does a learner of one process, on any device and in any number format.
    """
    for layer in lora_layers(causal_lm).values():
        first, second = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
        for linear in (first, second):
            if linear.weight.is_meta:
                linear.to_empty(device="cpu")
        drawn = nn.Linear(first.in_features, first.out_features, bias=False, device="cpu", dtype=torch.float32)
        first.weight.copy_(drawn.weight)
        second.weight.zero_()


@torch.no_grad()
def read_start(adapted: Any, start: Path) -> None:
    """Set the weights of a new adapter to those in the folder `start`. Raises ModelError if they do not fit."""
    from peft import set_peft_model_state_dict

    tensors = read_tensors(start / ADAPTER_FILE)
    for name, value in tensors.items():
        check_finite(name, value, start)
    report = set_peft_model_state_dict(adapted, tensors, adapter_name=ADAPTER)
    missing = [name for name in report.missing_keys if ".lora_" in name]
    if missing or report.unexpected_keys:
        raise ModelError(f"the adapter in {start} does not fit its base: {(missing or report.unexpected_keys)[0]}")


def first_adapter(trainable: Mapping[str, Parameter]) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which the adapter has its present weights, whatever they are by then.

    The memory of later weights is not written, because a thread may be writing them to a checkpoint. FSDP holds the
    memory of shards, which checkpoints copy.
    """
    first = {name: value.detach().clone() for name, value in trainable.items()}

    @contextmanager
    def context() -> Iterator[None]:
        later = {name: value.detach().clone() if is_sharded(value) else value.data for name, value in trainable.items()}
        _set_values(trainable, first)
        try:
            yield
        finally:
            _set_values(trainable, later)

    return context


@torch.no_grad()
def _set_values(parameters: Mapping[str, Parameter], values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        if is_sharded(parameter):
            parameter.copy_(values[name])
        else:
            parameter.data = values[name]


def adapter_merger(causal_lm: Any) -> Callable[[str, Tensor], Tensor]:
    """Return a function of a weight's plain name and value that merges the adapter into the value."""
    layers = {f"{name}.weight": layer for name, layer in lora_layers(causal_lm).items()}
    return lambda name, value: _merged(layers[name], value) if name in layers else value


def adapter_alone(adapted: Any, *, base_name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights and the configuration of a peft model's adapter, as its `save_pretrained` names them.

    `base_name` is the public name of the base, never a local folder.
    """
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(adapted, adapter_name=ADAPTER, save_embedding_layers=False)
    config = adapted.peft_config[ADAPTER].to_dict()
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
    return tensors, plain | {"base_model_name_or_path": base_name, "inference_mode": True}


@torch.no_grad()
def _merged(layer: Any, value: Tensor) -> Tensor:
    """Return `value` with the adapter of `layer` merged, in float32; in one buffer, because peft's merge makes five."""
    if is_sharded(value) or getattr(layer, "fan_in_fan_out", True):
        added: Tensor = layer.get_delta_weight(ADAPTER)
        return value.float() + added.float()
    down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    merged = value.to(torch.float32, copy=True)
    return merged.addmm_(up.float(), down.float(), alpha=layer.scaling[ADAPTER])
