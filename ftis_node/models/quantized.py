"""A base model in 4 bits under a LoRA adapter (`--quantize 4bit`): NF4 of QLoRA (arXiv 2305.14314), by bitsandbytes.

Each worker quantizes the model's own weights while it loads them, map by map. Nothing is stored. Equal weights have
equal codes, whatever worker or engine computes them, so log-probs of the learner and its generator agree.

    linear maps of the layers     4 bits a weight, and a float32 scale for each block of 64 weights
    all else                      the node's dtype: embedding, output head, norms, biases, the adapter

The scales are not quantized a second time. Their blocks would cross the borders of the maps that vLLM joins. Mixtures
of experts are refused: transformers and vLLM quantize different maps of their routers.
"""

from __future__ import annotations

from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, Any

from ftis_node.errors import MachineError, ModelError, how_to_install
from ftis_node.models.shape import has_experts
from ftis_node.models.source import ModelSource

if TYPE_CHECKING:
    import torch

BLOCK = 64  # weights with one scale
BYTES = 0.5 + 4 / BLOCK  # of a weight
TYPE = "nf4"


def missing_package() -> str:
    """Return how to install bitsandbytes; empty if it is installed."""
    return "" if find_spec("bitsandbytes") else how_to_install("quantize")


def check_installed() -> None:
    """Raise MachineError if bitsandbytes is missing."""
    if advice := missing_package():
        raise MachineError(f"--quantize 4bit needs bitsandbytes: {advice}")


def check_dense(source: ModelSource) -> None:
    """Raise ModelError for a mixture of experts."""
    if has_experts(source):
        raise ModelError(f"{source.name} is a mixture of experts, which --quantize 4bit excludes: give --quantize none")


def loading_arguments(*, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return the arguments with which transformers' `from_pretrained` quantizes. Raises MachineError."""
    check_installed()
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=TYPE, bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": config, "device_map": {"": device}}


def use_stored_codes(model: Any) -> None:
    """Keep bitsandbytes from converting weights and activations to bfloat16, as it does on some CPUs outside of
    training.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def quantized_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the quantized weights of `model` had before, by name."""
    states = {name: getattr(weight, "quant_state", None) for name, weight in model.named_parameters()}
    return {name: tuple(state.shape) for name, state in states.items() if state is not None}


def num_weights(model: Any) -> int:
    """Return the number of a model's weights; tied ones count once."""
    before = quantized_shapes(model)
    return sum(prod(before.get(name, weight.shape)) for name, weight in model.named_parameters())
