"""Attention of one new token over a cache that several query heads share.

With grouped queries and a mask, transformers copies the cached keys and values once for every query head. That takes
most of a decode step's time. For a single query token the heads of a group can serve as query positions instead. `[R,
heads, 1, D]` becomes `[R, key heads, heads / key heads, D]`: the same products without a copy. All other cases use
transformers' own function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from torch import Tensor, nn

NAME = "ftis_grouped"


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention as transformers' `sdpa_attention_forward`: `[R, heads, Q, D]` in, `[R, Q, heads, D]` out."""
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
    """Make `model` decode with `grouped_attention`, if its code accepts an attention function."""
    if model._can_set_attn_implementation():
        AttentionInterface.register(NAME, grouped_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
