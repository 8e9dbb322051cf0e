"""What the forward pass saves of the activations for the backward pass: less in gated blocks, least with recomputation.

Gated feed-forward blocks save half as much as with autograd's defaults:

    down(silu(gate(x)) * up(x))        saved: gate(x), up(x)        recomputed: silu, the product

If the last map is not one plain matrix (it has an adapter), it saves its input, the product, too.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")
LARGE = 300.0  # of a hidden value, so that a limit inside a block acts
TOLERANCE = 1e-3  # of the largest value


def replace_gated_blocks(causal_lm: nn.Module) -> int:
    """Replace the computation of all gated blocks with SiLU, found by transformers' names of their parts.

    Returns their number. Values are identical, gradients equal up to rounding. Blocks with another formula stay.
    """
    found: list[Any] = [
        module
        for module in causal_lm.modules()
        if all(isinstance(getattr(module, part, None), nn.Module) for part in PARTS)
    ]
    without_values = {type(module): module for module in found if module.gate_proj.weight.is_meta}
    judged = {kind: _is_gated(_with_values(module)) for kind, module in without_values.items()}
    gated = [module for module in found if judged.get(type(module), True) and (judged or _is_gated(module))]
    for module in gated:
        module.forward = MethodType(_forward, module)  # one function for all layers, so that it compiles once
    return len(gated)


@torch.no_grad()
def _is_gated(module: Any) -> bool:
    """Return whether a block computes `_forward`: some classes with these parts have factors, limits or experts."""
    has_more = {name for name, _ in module.named_children()} - set(PARTS) or list(module.parameters(recurse=False))
    if has_more or type(module.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        return False
    weight, width = module.gate_proj.weight, module.gate_proj.in_features
    dtype = weight.dtype if weight.is_floating_point() else torch.float32
    hidden = torch.linspace(-LARGE, LARGE, 4 * width, device=weight.device).to(dtype).view(1, 4, width)
    theirs, ours = module(hidden), _forward(module, hidden)
    return torch.allclose(theirs, ours, rtol=0.0, atol=TOLERANCE * float(theirs.abs().max()))


@torch.no_grad()
def _with_values(module: Any) -> Any:
    """Return a copy of a block on the meta device, with random values on the CPU."""
    copied, generator = copy.deepcopy(module).to_empty(device="cpu"), torch.Generator().manual_seed(0)
    for parameter in copied.parameters():
        parameter.normal_(std=0.02, generator=generator)
    return copied


def _forward(module: Any, hidden: Tensor) -> Tensor:
    gate, up, down = module.gate_proj(hidden), module.up_proj(hidden), module.down_proj
    result: Tensor
    if type(down) is nn.Linear and getattr(down, "bias", None) is None:
        result = GatedLinear.apply(gate, up, down.weight)  # type: ignore[no-untyped-call]
    else:
        result = down(Gated.apply(gate, up))  # type: ignore[no-untyped-call]
    return result


class Gated(Function):
    """An autograd function for silu(gate) * up, all `[..., I]`, that saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return _gated_backward(gradients[0], gate, up, functional.silu(gate))


class GatedLinear(Function):
    """An autograd function for (silu(gate) * up) @ weight.T, `[..., I]` and `[H, I]` to `[..., H]`, as `Gated`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return functional.linear(functional.silu(gate).mul_(up), weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
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


def decoder_layers(causal_lm: Any) -> list[Any]:
    """Return the layers of transformers' own classes; none for a model with other ones."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in causal_lm.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute_activations(causal_lm: Any, *, layers_kept: int = 0) -> bool:
    """Enable activation recomputation: save only each layer's input. Costs a third more time, saves most of the memory.

    The last `layers_kept` layers save everything: the backward pass frees that before it recomputes the others.
    Returns whether that changed anything: not if layers already recompute, or are none of transformers'.
    """
    layers = decoder_layers(causal_lm)
    num_recomputed = len(layers) - layers_kept
    if all(layer.gradient_checkpointing for layer in layers[:num_recomputed]):
        return False
    how = {"use_reentrant": False, "preserve_rng_state": _has_dropout(causal_lm)}
    causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = layer.training = number < num_recomputed
    return True


def _has_dropout(causal_lm: Any) -> bool:
    """Return whether a module or a setting has a dropout above 0."""
    settings = causal_lm.config.to_dict()
    rates = [value for name, value in settings.items() if "dropout" in name or name.endswith("_pdrop")]
    rates += [module.p for module in causal_lm.modules() if isinstance(module, torch.nn.Dropout)]
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)
