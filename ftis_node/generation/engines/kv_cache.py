"""Operations on the rows of a cache: grow, repeat, drop, trim and join.

An attention layer holds keys and values `[R, heads, S, D]`. All rows end at the same column. Shorter ones are padded on
the left, and a mask `[R, S]` marks the real columns. New rows join a running batch by padding the shorter side. When
the longest row leaves, the columns that only it used are cut off. A recurrent layer holds states `[R, ...]` of fixed
size. The model's code keeps padded columns out of them.

The attention layer of transformers' cache copies all columns to append one. The layer here keeps spare columns and
writes into them.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ftis_node.errors import EngineError

SPARE_COLUMNS = 64
NAME = "ftis_grouped"


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention as transformers' `sdpa_attention_forward`: `[R, heads, Q, D]` in, `[R, Q, heads, D]` out.

    With grouped queries and a mask, that function copies the cached keys and values once for every query head. The
    copies take most of a decode step's time. For a single query token the heads of a group serve as query positions
    instead: `[R, heads, 1, D]` becomes `[R, key heads, heads / key heads, D]`, the same products without a copy.
    """
    num_rows, num_heads, num_queries, width = query.shape
    shares_keys = key.shape[1] < num_heads
    has_plain_mask = attention_mask is None or attention_mask.shape[1] == 1
    if num_queries > 1 or not shares_keys or not has_plain_mask or options.get("position_bias") is not None:
        output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output
    grouped = query.reshape(num_rows, key.shape[1], -1, width)
    mixed = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=options.get("scaling"))
    return mixed.reshape(num_rows, 1, num_heads, -1), None


def use_grouped_attention(model: Any) -> None:
    """Make `model` decode with `grouped_attention` in place of SDPA, if it uses that."""
    if model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation():
        AttentionInterface.register(NAME, grouped_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """A cache layer whose `keys` and `values` are the used part of larger buffers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Append columns; return all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        if self._buffers is None or self._buffers[0].shape[2] < end:
            self._buffers = _with_spare(self.keys, end), _with_spare(self.values, end)
        keys, values = self._buffers
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def replace(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self._buffers = keys, values, None


def empty_cache(config: Any) -> Any:
    """Return a cache without rows for a model of this configuration.

    Attention layers keep all columns, including those of sliding windows. Raises EngineError for a layer of another
    kind than attention or a recurrence.
    """
    layers = []
    for layer in DynamicCache(config=config).layers:
        kind = type(layer)
        if kind not in (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer):
            raise EngineError(f"its cache has a {kind.__name__}")
        layers.append(layer if kind is LinearAttentionLayer else GrowingLayer())
    return Cache(layers=layers)


def forward(model: Any, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any, *, logits_to_keep: int) -> Tensor:
    """Return logits `[R, C, V]` of the last columns of `ids`, all for 0; the cache grows by the columns of `ids`."""
    takes = signature(model.forward).parameters
    name = "past_key_values" if "past_key_values" in takes else "cache_params"  # Mamba
    logits: Tensor = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=logits_to_keep,
        **{name: cache},
    ).logits
    return logits


def select_rows(cache: Any, mask: Tensor, rows: Tensor) -> Tensor:
    """Keep `rows` (`[K]` int64, with repeats allowed), trimmed to the columns they use. Returns the new mask."""
    mask = mask.index_select(0, rows)
    first = int(mask.any(dim=0).to(torch.uint8).argmax())
    for layer in cache.layers:
        if isinstance(layer, GrowingLayer):
            keys, values = layer.keys[:, :, first:], layer.values[:, :, first:]
            layer.replace(keys.index_select(0, rows), values.index_select(0, rows))
        else:
            for states in _states(layer):
                states |= {number: state.index_select(0, rows) for number, state in _present(states)}
    return mask[:, first:]


def join(cache: Any, mask: Tensor, other: Any, other_mask: Tensor) -> Tensor:
    """Append the rows of `other` to `cache`. Returns the mask of both."""
    width = max(mask.shape[1], other_mask.shape[1])
    for layer, new in zip(cache.layers, other.layers, strict=True):
        if isinstance(layer, GrowingLayer):
            layer.replace(
                torch.cat([_widened(layer.keys, width), _widened(new.keys, width)]),
                torch.cat([_widened(layer.values, width), _widened(new.values, width)]),
            )
        else:
            for states, new_states in zip(_states(layer), _states(new), strict=True):
                present, new_present = _present(states), dict(_present(new_states))
                states |= {number: torch.cat([state, new_present[number]]) for number, state in present}
    return torch.cat([pad(each, (width - each.shape[1], 0)) for each in (mask, other_mask)])


def _states(layer: LinearAttentionCacheLayerMixin) -> tuple[dict[int, Tensor | None], dict[int, Tensor | None]]:
    """Return the states of a recurrent layer by number. A layer without a recurrence has none."""
    return layer.conv_states, layer.recurrent_states


def _present(states: dict[int, Tensor | None]) -> list[tuple[int, Tensor]]:
    return [(number, state) for number, state in states.items() if state is not None]


def _widened(states: Tensor, width: int) -> Tensor:
    """Return `[R, heads, S, D]` padded on the left to `width` columns."""
    return pad(states, (0, 0, width - states.shape[2], 0))


def _with_spare(states: Tensor, num_columns: int) -> Tensor:
    """Return a buffer that begins with `states` and holds at least `num_columns` columns."""
    num_rows, num_heads, num_used, width = states.shape
    buffer = states.new_empty(num_rows, num_heads, num_columns + SPARE_COLUMNS, width)
    buffer[:, :, :num_used] = states
    return buffer
