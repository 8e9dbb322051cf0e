"""The same by torch's FlashAttention kernels, for half precision on a GPU: all blocks at once, then all links.

The kernels take sequences of unlike lengths end to end (`cum_seq`). Their backward pass is given the joint output and
log-sum-exp, as in `attention_kernels.py`; torch's public functions do not let one do that, so these are its inner ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from ftis_node.learner.model.attention_kernels import join

if TYPE_CHECKING:
    from collections.abc import Sequence

HALF = (torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)  # Ampere

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Ends:
    """Where sequences that lie end to end begin and end: `cumulative` `[S + 1]` int32, and the longest."""

    cumulative: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Ends:
        """From their lengths."""
        ends = [0, *accumulate(lengths)]
        return cls(torch.tensor(ends, dtype=torch.int32, device=device), max(lengths, default=0))


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """Blocks by their ends; of links the tokens `[K]`, the prompts' tokens `[P]`, and the ends of both."""

    blocks: Ends
    link_tokens: Tensor
    link_prompts: Tensor
    tokens: Ends
    prompts: Ends

    @classmethod
    def of(
        cls, block_ends: Sequence[int], links: Sequence[tuple[int, int, int, int]], device: torch.device
    ) -> FlashPlan:
        """`links` are (first token, end, prompt's first token, its end)."""
        lengths = [end - start for start, end in zip([0, *block_ends], block_ends, strict=False)]
        empty = [torch.zeros(0, dtype=torch.int64)]
        return cls(
            blocks=Ends.of(lengths, device),
            link_tokens=torch.cat(empty + [torch.arange(start, end) for start, end, _, _ in links]).to(device),
            link_prompts=torch.cat(empty + [torch.arange(start, end) for _, _, start, end in links]).to(device),
            tokens=Ends.of([end - start for start, end, _, _ in links], device),
            prompts=Ends.of([end - start for _, _, start, end in links], device),
        )


def is_usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device has the kernels for `dtype`."""
    return device.type == "cuda" and dtype in HALF and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


class FlashPackedAttention(Function):
    """`[1, h, T, D]` to the same."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: FlashPlan, scale: float) -> Tensor:
        """The kernels want `[T, h, D]`."""
        query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        output, logsumexp, random = _flash(query, key, value, plan.blocks, plan.blocks, scale, is_causal=True)
        if len(plan.link_tokens):
            queries, keys, values = query[plan.link_tokens], key[plan.link_prompts], value[plan.link_prompts]
            found, sums, random = _flash(queries, keys, values, plan.tokens, plan.prompts, scale, is_causal=False)
            own, own_sums = output[plan.link_tokens].transpose(0, 1), logsumexp[:, plan.link_tokens]
            join(own, own_sums, found.transpose(0, 1), sums)
            output[plan.link_tokens], logsumexp[:, plan.link_tokens] = own.transpose(0, 1), own_sums
        ctx.save_for_backward(query, key, value, output, logsumexp, *random)
        ctx.plan, ctx.scale = plan, scale
        return output.transpose(0, 1)[None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Both parts' gradients by the joint output and log-sum-exp."""
        gradient = gradients[0][0].transpose(0, 1).contiguous()
        query, key, value, output, logsumexp, *random = ctx.saved_tensors
        plan: FlashPlan = ctx.plan
        found = _flash_backward(
            gradient, query, key, value, output, logsumexp, plan.blocks, plan.blocks, random, ctx.scale, is_causal=True
        )
        if len(tokens := plan.link_tokens):
            prompts = plan.link_prompts
            parts = _flash_backward(
                gradient[tokens],
                query[tokens],
                key[prompts],
                value[prompts],
                output[tokens],
                logsumexp[:, tokens].contiguous(),
                plan.tokens,
                plan.prompts,
                random,
                ctx.scale,
                is_causal=False,
            )
            for whole, part, where in zip(found, parts, (tokens, prompts, prompts), strict=True):
                whole.index_add_(0, where, part)
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in found)
        return query, key, value, None, None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, queries: Ends, keys: Ends, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Output `[T, h, D]`, log-sum-exp `[h, T]`, and the (unused) random state that the backward pass asks for."""
    output, logsumexp, seed, unused, _ = aten._flash_attention_forward(
        query,
        key,
        value,
        queries.cumulative,
        keys.cumulative,
        queries.longest,
        keys.longest,
        0.0,
        is_causal,
        False,
        scale=scale,
    )
    return output, logsumexp, (seed, unused)


def _flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    queries: Ends,
    keys: Ends,
    random: Sequence[Tensor],
    scale: float,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = aten._flash_attention_backward(
        gradient,
        query,
        key,
        value,
        output,
        logsumexp,
        queries.cumulative,
        keys.cumulative,
        queries.longest,
        keys.longest,
        0.0,
        is_causal,
        *random,
        scale=scale,
    )
    return found
