"""Methods and filters of other packages (`ftis_node/plugins.py`).

A plug-in method is a `Method`. Its objective runs in the learner's process, with the same validated `Batch` as a
built-in one. A plug-in filter is a function of `Batch` and `Settings` that returns bool `[N]`, true for kept
completions. Results are checked, because a wrong shape would broadcast into a wrong gradient.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftis_node.errors import ConfigError
from ftis_node.plugins import FILTER_GROUP, Plugin, call_plugin, describe, find_entry

if TYPE_CHECKING:
    from collections.abc import Callable

    FilterRule = Callable[[Any, Any], Tensor]  # of a `Batch` and `Settings`


@lru_cache(maxsize=16)
def load_filter(name: str) -> FilterRule | None:
    """Return the filter of the plug-in `name`; None if no package has one. Raises ConfigError for a faulty one."""
    entry = find_entry(FILTER_GROUP, name, error=ConfigError)
    if entry is None:
        return None
    plugin = describe(entry)
    rule = call_plugin(plugin, entry.load, error=ConfigError)
    if not callable(rule):
        raise ConfigError(f"{plugin} is a {type(rule).__name__}, which cannot be called")

    def keep(batch: Any, settings: Any) -> Tensor:
        kept = call_plugin(plugin, lambda: rule(batch, settings), error=ConfigError)
        return require_shape(plugin, kept, ((len(batch.mask),),), torch.bool)

    return keep


def require_shape(plugin: Plugin, values: object, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of this type and one of these shapes. Raises ConfigError for anything else."""
    expected = " or ".join(str(list(shape)) for shape in shapes)
    if not isinstance(values, Tensor):
        raise ConfigError(f"{plugin} gave a {type(values).__name__} instead of a tensor {expected}")
    if values.dtype != dtype or tuple(values.shape) not in shapes:
        got = f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
        raise ConfigError(f"{plugin} gave {got} instead of {str(dtype).removeprefix('torch.')} {expected}")
    return values
