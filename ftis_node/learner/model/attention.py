"""Attention over sequences that lie packed in one row, with prompts that several completions share.

    prompt p1 p2 p3 | a1 a2 | b1 | c1 c2 c3        blocks: 0-3, 3-5, 5-6, 6-9       link: 3-9 to 0-3

Tokens of a *block* see each other causally; tokens of a *link* see a whole prompt besides (`layout.py`). But for short
texts no other pair is computed, and neither a mask nor scores are ever held as a whole. A plain packed row has blocks
alone. The two parts of a completion's attention are joined by their log-sum-exp (`attention_kernels.py`).

transformers calls `attend` under the name `ATTENTION` and hands it `plan` through the model's forward arguments;
without a plan, rows are plain texts and torch's own attention does them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from ftis_node.learner.data.layout import divide
from ftis_node.learner.model import attention_flash
from ftis_node.learner.model.attention_kernels import (
    attend_all,
    attend_all_backward,
    attend_self,
    attend_self_backward,
    join,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftis_node.learner.data.layout import Bucket, Link, Span

ATTENTION = "ftis_packed"
UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias")  # what other models add to attention


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one row is computed: blocks and links one by one, buckets at once, or all by `flash`."""

    blocks: tuple[Span, ...] = ()
    links: tuple[Link, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    flash: attention_flash.FlashPlan | None = None

    @classmethod
    def of(
        cls, blocks: Sequence[Span], links: Sequence[Link], device: torch.device, *, flash: bool = False
    ) -> AttentionPlan:
        """For one device; with `flash` for FlashAttention's kernels. `blocks` tile the row from its first token on."""
        if flash:
            pairs = [(link.tokens.start, link.tokens.end, link.prompt.start, link.prompt.end) for link in links]
            return cls(flash=attention_flash.FlashPlan.of([block.end for block in blocks], pairs, device))
        long_blocks, other_links, buckets = divide(blocks, links, device)
        return cls(tuple(long_blocks), tuple(other_links), tuple(buckets))


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    plan: AttentionPlan | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: `[1, h, T, D]` queries to `[1, T, h, D]`.

    Raises NotImplementedError for a model whose attention is of another kind.
    """
    if plan is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output: Tensor
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)
        return output, None
    if found := [name for name in UNKNOWN if more.get(name) is not None]:
        raise NotImplementedError(f"attention with {found[0]} over packed sequences")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if plan.flash is not None:
        packed: Tensor = attention_flash.FlashPackedAttention.apply(  # type: ignore[no-untyped-call]
            query, key, value, plan.flash, scale
        )
    else:
        packed = PackedAttention.apply(query, key, value, plan, scale)  # type: ignore[no-untyped-call]
    return packed.transpose(1, 2), None


def is_flash_usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether FlashAttention's kernels can be asked for on this device, in `dtype`."""
    return attention_flash.is_usable(device, dtype)


def register(function: Callable[..., tuple[Tensor, None]] = attend) -> None:
    """Make `ATTENTION` known to transformers. Masks are not made for it: rows are plain, or there is a plan."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, function)


class PackedAttention(Function):
    """`[1, h, T, D]` to the same, kept for the backward pass: queries, keys, values, output, one number a head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """Blocks first, each token in one of them; then links are joined to what is there."""
        # Laid out as the projection after it wants to read it: all heads of a token side by side.
        output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        exact = query.dtype if query.dtype == torch.float64 else torch.float32
        logsumexp = query.new_empty(query.shape[:3], dtype=exact)
        for block in plan.blocks:
            at = slice(block.start, block.end)
            output[:, :, at], logsumexp[:, :, at] = attend_self(
                query[:, :, at], key[:, :, at], value[:, :, at], scale=scale
            )
        for bucket in plan.buckets:
            queries, keys, values = (bucket.gather(tensor) for tensor in (query, key, value))
            found, sums = attend_self(queries, keys, values, scale=scale, mask=bucket.mask)
            bucket.scatter(found, output)
            bucket.scatter(sums[..., None], logsumexp[..., None])
        for link in plan.links:
            at, to = slice(link.tokens.start, link.tokens.end), slice(link.prompt.start, link.prompt.end)
            found, sums = attend_all(query[:, :, at], key[:, :, to], value[:, :, to], scale=scale)
            join(output[:, :, at], logsumexp[:, :, at], found, sums)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.plan, ctx.scale = plan, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Each part's gradients, by the joint output and log-sum-exp."""
        (gradient,) = gradients
        query, key, value, output, logsumexp = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        found = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        for block in plan.blocks:
            at = slice(block.start, block.end)
            parts = attend_self_backward(
                *(tensor[:, :, at] for tensor in (gradient, query, key, value, output, logsumexp)), scale=ctx.scale
            )
            for whole, part in zip(found, parts, strict=True):
                whole[:, :, at] = part
        for bucket in plan.buckets:
            padded = bucket.gather(gradient, pad_with_zero=True)
            queries, keys, values, joint = (bucket.gather(tensor) for tensor in (query, key, value, output))
            sums = bucket.gather(logsumexp[..., None])[..., 0]
            parts = attend_self_backward(padded, queries, keys, values, joint, sums, scale=ctx.scale, mask=bucket.mask)
            for whole, part in zip(found, parts, strict=True):
                bucket.scatter(part, whole)
        for link in plan.links:
            at, to = slice(link.tokens.start, link.tokens.end), slice(link.prompt.start, link.prompt.end)
            parts = attend_all_backward(
                gradient[:, :, at],
                query[:, :, at],
                key[:, :, to],
                value[:, :, to],
                output[:, :, at],
                logsumexp[:, :, at],
                scale=ctx.scale,
            )
            for whole, part, where in zip(found, parts, (at, to, to), strict=True):
                whole[:, :, where] += part
        return (*found, None, None)
