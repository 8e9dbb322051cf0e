"""Methods and filters of other packages (`ftis_node/plugins.py`).

A plug-in method is a `Method`. Its objective runs in the learner's process, with the same validated `Batch` as a
built-in one. A plug-in filter is a function of `Batch` and `Settings` that returns bool `[N]`, true for kept
completions. Results are checked, because a wrong shape would broadcast into a wrong gradient.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ftis_node.algorithms.methods import Method
from ftis_node.algorithms.settings import TENSORS, Settings
from ftis_node.errors import ConfigError
from ftis_node.plugins import FILTER_GROUP, METHOD_GROUP, Plugin, call_plugin, describe, find_entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftis_node.algorithms.batch import Batch

    FilterRule = Callable[[Batch, Settings], Tensor]


@lru_cache(maxsize=16)
def load_method(name: str) -> Method | None:
    """Return the method of the plug-in `name`; None if no package has one. Raises ConfigError for a faulty one."""
    entry = find_entry(METHOD_GROUP, name, error=ConfigError)
    if entry is None:
        return None
    plugin = describe(entry)
    method = call_plugin(plugin, entry.load, error=ConfigError)
    if not isinstance(method, Method):
        raise ConfigError(f"{plugin} is a {type(method).__name__}, which is not a Method")
    known = {*Settings.__dataclass_fields__, *TENSORS}
    if unknown := sorted({*method.takes, *method.defaults} - known):
        raise ConfigError(f"{plugin} takes {', '.join(unknown)}, which is no parameter of policy_loss")

    def objective(batch: Batch, settings: Settings) -> Tensor:
        values = call_plugin(plugin, lambda: method.objective(batch, settings), error=ConfigError)
        num_rows, num_columns = batch.mask.shape
        return _require_shape(plugin, values, ((num_rows, num_columns), (num_rows, 1)), torch.float64)

    return replace(method, objective=objective)


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

    def keep(batch: Batch, settings: Settings) -> Tensor:
        kept = call_plugin(plugin, lambda: rule(batch, settings), error=ConfigError)
        return _require_shape(plugin, kept, ((len(batch.mask),),), torch.bool)

    return keep


def _require_shape(plugin: Plugin, values: object, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of this type and one of these shapes. Raises ConfigError for anything else."""
    wanted = " or ".join(str(list(shape)) for shape in shapes)
    if not isinstance(values, Tensor):
        raise ConfigError(f"{plugin} gave a {type(values).__name__} instead of a tensor {wanted}")
    if values.dtype != dtype or tuple(values.shape) not in shapes:
        got = f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
        raise ConfigError(f"{plugin} gave {got} instead of {str(dtype).removeprefix('torch.')} {wanted}")
    return values
