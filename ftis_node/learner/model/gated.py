"""Gated feed-forward blocks that save half as much for their backward pass.

    down(silu(gate(x)) * up(x))        saved: gate(x), up(x)        recomputed: silu, the product

By default autograd saves the input of every operation. In this block that is four tensors of the model's largest width,
most of what a layer saves. Recomputing two of them costs two elementwise passes and no matrix product. If the last map
is not one plain matrix (it has an adapter), it saves its input, the product, and three of four remain.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


def save_memory(causal_lm: nn.Module) -> int:
    """Replace the computation of all gated blocks of `causal_lm` with SiLU, which transformers' names of their parts
    identify.

    Returns their number. Values are identical, gradients equal up to rounding.
    """
    found = [module for module in causal_lm.modules() if all(hasattr(module, part) for part in PARTS)]
    gated = [module for module in found if _is_silu(module.act_fn)]
    for module in gated:
        module.forward = MethodType(_forward, module)  # one function for all layers, so that it compiles once
    return len(gated)


def _is_silu(activation: Any) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


def _forward(module: Any, hidden: Tensor) -> Tensor:
    gate, up, down = module.gate_proj(hidden), module.up_proj(hidden), module.down_proj
    result: Tensor
    if type(down) is nn.Linear and getattr(down, "bias", None) is None:
        result = GatedLinear.apply(gate, up, down.weight)  # type: ignore[no-untyped-call]
    else:
        result = down(Gated.apply(gate, up))  # type: ignore[no-untyped-call]
    return result


class Gated(Function):
    """An autograd function for silu(gate) * up, all `[..., I]`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Save only the inputs."""
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Recompute silu."""
        gate, up = ctx.saved_tensors
        return _gated_backward(gradients[0], gate, up, functional.silu(gate))


class GatedLinear(Function):
    """An autograd function for (silu(gate) * up) @ weight.T, `[..., I]` and `[H, I]` to `[..., H]`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        """Save only the inputs."""
        ctx.save_for_backward(gate, up, weight)
        return functional.linear(functional.silu(gate).mul_(up), weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Recompute silu and the product."""
        gate, up, weight = ctx.saved_tensors
        gradient = gradients[0]
        silu = functional.silu(gate)
        weight_gradient = None
        if ctx.needs_input_grad[2]:
            weight_gradient = gradient.flatten(0, -2).T @ (silu * up).flatten(0, -2)
        return *_gated_backward(gradient @ weight, gate, up, silu), weight_gradient


def _gated_backward(gradient: Tensor, gate: Tensor, up: Tensor, silu: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up; `silu` is overwritten."""
    up_gradient = silu.mul_(gradient)
    return torch.ops.aten.silu_backward(gradient * up, gate), up_gradient
