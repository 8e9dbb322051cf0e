"""Checks of callers' arguments. Each raises a ValueError that names the argument.

An unchecked shape or NaN would become a wrong gradient without an error. Both entry points of the package check
everything once, with these functions. The formulas behind them check nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def require_tensor(
    name: str, value: object, *, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | torch.Size
) -> Tensor:
    """Return `value` as a tensor. Raises ValueError naming `name` unless it has one of `dtypes` and `shape`."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, not {type(value).__name__}")
    if value.dtype not in dtypes:
        raise ValueError(f"{name} must be one of {_names(dtypes)}, not {_names((value.dtype,))}")
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} must have the shape {list(shape)}, not {list(value.shape)}")
    return value


def require_finite(name: str, values: Tensor, *, where: str = "") -> None:
    """Raise ValueError naming the first NaN or infinity of `values`; the message ends with `where`."""
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return
    position = (~finite).nonzero()[0].tolist()
    raise ValueError(f"{name} holds a non-finite value{where}: {values[tuple(position)].item()} at {position}")


def require_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raise ValueError listing `known` unless `value` is one of them."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
