"""Rows of a key-value cache that come and go: repeat, drop, trim and join.

A cache holds keys and values `[R, heads, S, D]` a layer. All rows end at the same column; shorter ones are padded on
the left, and a mask `[R, S]` says which columns are real. So new rows join a running batch by padding whichever side
is shorter, and when the longest row leaves, the columns that only it used are cut off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache


def empty_cache() -> Any:
    """A cache without rows. Made without a configuration, so that sliding-window layers keep all columns, too."""
    return DynamicCache()


def select_rows(cache: Any, mask: Tensor, rows: Tensor) -> Tensor:
    """Keep `rows` (`[K]` int64, with repeats allowed), trimmed to the columns they use. Returns the new mask."""
    mask = mask.index_select(0, rows)
    first = int(mask.any(dim=0).to(torch.uint8).argmax())
    for layer in cache.layers:
        layer.keys = layer.keys.index_select(0, rows)[:, :, first:]
        layer.values = layer.values.index_select(0, rows)[:, :, first:]
    return mask[:, first:]


def join(cache: Any, mask: Tensor, other: Any, other_mask: Tensor) -> Tensor:
    """Append the rows of `other` to `cache`. Returns the mask of both."""
    num_columns = max(mask.shape[1], other_mask.shape[1])
    for layer, other_layer in zip(cache.layers, other.layers, strict=True):
        layer.keys = torch.cat([_widen(layer.keys, num_columns), _widen(other_layer.keys, num_columns)])
        layer.values = torch.cat([_widen(layer.values, num_columns), _widen(other_layer.values, num_columns)])
    masks = [pad(each, (num_columns - each.shape[1], 0)) for each in (mask, other_mask)]
    return torch.cat(masks)


def _widen(states: Tensor, num_columns: int) -> Tensor:
    """Pad `[R, heads, S, D]` on the left to `num_columns`."""
    return pad(states, (0, 0, num_columns - states.shape[2], 0))
