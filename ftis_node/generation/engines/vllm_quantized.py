"""vLLM's linear maps in the 4 bits of `models/quantized.py`, by bitsandbytes. vLLM 0.32 does not have such a method.

vLLM reads the model's own weights. When all parts of a joined map have arrived, they are quantized together, and freed.
Blocks of weights with one scale do not cross the borders of parts. So the codes are those of the learner's single maps.
An import of this module registers the method, in vLLM's own processes by the unpickled configuration.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes
import torch
from torch import Tensor
from torch.nn import Parameter
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase

from ftis_node.models.accelerators import MIN_CAPABILITY
from ftis_node.models.quantized import BLOCK, TYPE

METHOD = "ftis_nf4"


@register_quantization_config(METHOD)
class Nf4Config(QuantizationConfig):  # type: ignore[misc]
    """vLLM's configuration of the method: it has no options."""

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 10 * MIN_CAPABILITY[0] + MIN_CAPABILITY[1]

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Nf4Config:
        return cls()

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return the method of a layer; None for embedding and output head, which stay as they are."""
        return Nf4Linear() if isinstance(layer, LinearBase) else None


class Nf4Linear(OnlineLinearBase):  # type: ignore[misc]
    """The linear map, for one process or its part of several."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Prepare the layer. Raises ValueError for parts at whose borders the learner's blocks would be divided."""
        rows = input_size_per_partition if input_size_per_partition != input_size else BLOCK
        if rows % BLOCK or any(size * input_size_per_partition % BLOCK for size in output_partition_sizes):
            raise ValueError(f"--quantize 4bit: a map of {input_size} x {output_size} cannot be divided into its parts")
        super().create_weights(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            **extra_weight_attrs,
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        if layer.weight.dtype == torch.uint8:  # vLLM calls again at the end
            return
        layer.shape = list(layer.weight.shape)
        codes, state = bitsandbytes.functional.quantize_4bit(
            layer.weight.data, blocksize=BLOCK, quant_type=TYPE, compress_statistics=False
        )
        layer.weight = Parameter(codes, requires_grad=False)
        layer.register_buffer("scales", state.absmax, persistent=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        result: Tensor = torch.ops.bitsandbytes.gemm_4bit(
            x, layer.weight, layer.shape, layer.scales, BLOCK, TYPE, bias=bias
        )
        return result
