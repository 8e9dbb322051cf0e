"""A check before an update that all weights stay finite, so that no backup is needed.

Adam changes a weight by at most

    lr / (1 - beta1) * max(|m|, |g|) / eps + lr * decay * |w|

(arXiv 1412.6980, section 2.1; its denominator is never below eps). So the largest weight, moment and gradient bound the
result. This detects an infinite learning rate, an eps that underflows in float32, and a moment that is not finite. A
healthy step is 25 orders of magnitude below the limit. A backup of weights and moments would take three times the
memory of the weights.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import torch

from ftis_node.learner.distributed.sharded_tensors import is_sharded, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

LARGEST = torch.finfo(torch.float32).max / 4
LARGEST_GRADIENT = math.sqrt(LARGEST)  # its square is part of the second moment


@torch.no_grad()
def stays_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the next step of `optimizer`, an Adam, leaves weights and moments finite on all ranks."""
    return all(_group_stays_finite(optimizer, group) for group in optimizer.param_groups)


def _group_stays_finite(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    weights = [weight for weight in group["params"] if weight.grad is not None]
    gradient = _largest([weight.grad for weight in weights])
    moment = _largest([moment for weight in weights for moment in _moments(optimizer, weight)])
    weight, rate = _largest(weights), float(group["lr"])
    smallest = sys.float_info.min
    eps, kept = float(group.get("eps", 1.0)), float(group.get("betas", (0.0,))[0])  # plain SGD has neither
    scale = rate / max(1.0 - kept, smallest) / max(eps, smallest)
    bound = scale * max(moment, gradient) + weight * (1.0 + rate * float(group["weight_decay"]))
    figures = (gradient, moment, weight, rate, bound)
    return all(map(math.isfinite, figures)) and gradient <= LARGEST_GRADIENT and bound <= LARGEST


def _moments(optimizer: torch.optim.Optimizer, weight: Tensor) -> list[Tensor]:
    """Return the optimizer's floating-point state of a weight: its moments, or the scales of 8-bit moments."""
    held = optimizer.state[weight].values()
    return [value for value in held if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim]


def _largest(tensors: Sequence[Tensor]) -> float:
    """Return the largest absolute value of all tensors; NaN if any value is, 0 without tensors."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return 0.0
    if any(tensor.device.type != "cpu" or is_sharded(tensor) for tensor in filled):
        return float(whole(torch.nn.utils.get_total_norm(filled, norm_type=math.inf)))
    # On a CPU torch's infinity norm reads 0.5 GB/s, its extremes tens of GB/s.
    return float(torch.stack([each for tensor in filled for each in (tensor.max(), -tensor.min())]).max())
