"""Float32 masters of weights that the model computes with in another number format, or on another device.

    model's weight (bfloat16) --forward, backward--> gradient (bfloat16) --added up--> master's gradient (float32)
             ^                                                                               |
             +------------------ rounded ------------------ master (float32) <--optimizer----+

At a learning rate of 1e-6 an update is below the resolution of bfloat16 for most weights: rounding would remove it
every time. So the optimizer updates the masters, which accumulate such updates, and the model's weights are copies. A
gradient is added to its master's as soon as the backward pass has finished it, and is freed in the model. So sums over
micro-batches are in float32, and there is no second set of gradients. (Micikevicius et al., Mixed Precision Training,
arXiv 1710.03740.)

Masters may be in host memory beside a model on a GPU, with their gradients and Adam's moments. Then 2 bytes a weight
stay on the GPU. Each gradient, and each weight on its way back, passes through one pinned buffer.

A float32 weight on the masters' device is its own master, without a copy.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class MasterWeights:
    """`tensors` are the float32 masters of a model's trainable weights, by name. The optimizer updates them."""

    def __init__(self, weights: Mapping[str, Parameter], *, home: torch.device | None = None):
        """Create masters of the present `weights`, on the device `home`; None: on each weight's device."""
        self.tensors = {name: _master_of(weight, home or weight.device) for name, weight in weights.items()}
        self._followers = [
            (weight, master)
            for weight, master in zip(weights.values(), self.tensors.values(), strict=True)
            if weight is not master
        ]
        self._buffer: Tensor | None = None
        for weight, master in self._followers:
            hook = partial(self._take_gradient, master)
            weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the masters to the model's weights, rounded to their number format."""
        for weight, master in self._followers:
            if weight.device == master.device:
                weight.copy_(master)
            else:
                weight.copy_(self._staged(weight).copy_(master))

    @torch.no_grad()
    def _take_gradient(self, master: Parameter, weight: Parameter) -> None:
        gradient, weight.grad = weight.grad, None
        assert gradient is not None, "called after a gradient was accumulated"
        if gradient.device != master.device:
            gradient = self._staged(gradient).copy_(gradient)
        if master.grad is None:
            master.grad = gradient.to(torch.float32, copy=True)
        else:
            master.grad.add_(gradient)

    def _staged(self, like: Tensor) -> Tensor:
        """Return a part of the pinned buffer, shaped as `like`. The buffer has the size of the largest weight."""
        if self._buffer is None:
            num_bytes = max(weight.nbytes for weight, _ in self._followers)
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return self._buffer[: like.nbytes].view(like.dtype).view(like.shape)


def _master_of(weight: Parameter, home: torch.device) -> Parameter:
    if weight.dtype == torch.float32 and weight.device == home:
        return weight
    return Parameter(weight.detach().to(home, torch.float32))
