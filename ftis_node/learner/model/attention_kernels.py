"""Attention of some queries over some keys, with what is needed to join it to that of the same queries over others.

A kernel returns, beside its output, the log-sum-exp of each query's scores. Two outputs over two sets of keys are then
joined exactly (`join`), and each part's backward pass needs only the joint output and the joint log-sum-exp:

    P_ij = exp(s_ij - lse_i)     dS = P * (dO V^T - sum(dO * O))     with lse and O of the whole

which is how FlashAttention-2 (arXiv 2307.08691, section 2.3) recomputes its blocks, and why parts need no special case.

Shapes: queries `[B, h, L, D]`, keys and values `[B, k, K, D]` with k a divisor of h (grouped queries share a key head),
log-sum-exp `[B, h, L]` in float32, or float64 where the queries are.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_SCORES = 1 << 22  # held at once, a head's queries times keys: 16 MiB of float32

aten = torch.ops.aten


def attend_self(
    queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of a text over itself, causal or as `mask` `[B, 1, L, L]` says (0 or -inf): output and log-sum-exp."""
    mask = None if mask is None else mask.to(_exact(queries))
    if queries.device.type == "cpu":
        output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        return output, logsumexp
    return _attend(queries, keys, values, scale=scale, is_causal=mask is None, mask=mask)


def attend_self_backward(
    gradient: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to queries, keys and values of `attend_self`'s part in `output`."""
    mask = None if mask is None else mask.to(_exact(queries))
    tensors = gradient, queries, keys, values, output, logsumexp
    if queries.device.type == "cpu":
        found: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        return found
    return _attend_backward(*tensors, scale=scale, is_causal=mask is None, mask=mask)


def attend_all(queries: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Every query sees every key. Matrix products: with few keys 3 x faster than torch's CPU kernel."""
    return _attend(queries, keys, values, scale=scale, is_causal=False)


def attend_all_backward(
    gradient: Tensor, queries: Tensor, keys: Tensor, values: Tensor, output: Tensor, logsumexp: Tensor, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to queries, keys and values of `attend_all`'s part in `output`."""
    return _attend_backward(gradient, queries, keys, values, output, logsumexp, scale=scale, is_causal=False)


def join(output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> None:
    """Make `output` and `logsumexp`, in place, those over both sets of keys."""
    joint = torch.logaddexp(logsumexp, other_logsumexp)
    share, other_share = torch.exp(logsumexp - joint), torch.exp(other_logsumexp - joint)
    output.copy_(output * share[..., None] + other * other_share[..., None])
    logsumexp.copy_(joint)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, is_causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    output = torch.empty_like(queries, dtype=_exact(queries))
    logsumexp = queries.new_empty(queries.shape[:3], dtype=_exact(queries))
    folded_keys, folded_values = _widen(keys), _widen(values)
    for start, end in _chunks(queries, keys):
        scores = _scores(queries, folded_keys, scale, start, end, is_causal=is_causal, mask=mask)
        part = scores.logsumexp(dim=-1)
        logsumexp[:, :, start:end] = _unfold(part[..., None], queries, end - start)[..., 0]
        output[:, :, start:end] = _unfold(scores.sub_(part[..., None]).exp_() @ folded_values, queries, end - start)
    return output.to(queries.dtype), logsumexp


def _attend_backward(
    gradient: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    *,
    scale: float,
    is_causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    folded_keys, folded_values = _widen(keys), _widen(values)
    query_gradient = torch.empty_like(queries)
    key_gradient, value_gradient = torch.zeros_like(folded_keys), torch.zeros_like(folded_values)
    for start, end in _chunks(queries, keys):
        chunk = _fold(gradient, keys, start, end)
        folded = _fold(queries, keys, start, end)
        mean = (chunk * _fold(output, keys, start, end)).sum(dim=-1, keepdim=True)
        scores = _scores(queries, folded_keys, scale, start, end, is_causal=is_causal, mask=mask)
        weights = scores.sub_(_fold(logsumexp[..., None], keys, start, end)).exp_()
        value_gradient += weights.transpose(-1, -2) @ chunk
        score_gradient = (chunk @ folded_values.transpose(-1, -2)).sub_(mean).mul_(weights).mul_(scale)
        query_gradient[:, :, start:end] = _unfold(score_gradient @ folded_keys, queries, end - start)
        key_gradient += score_gradient.transpose(-1, -2) @ folded
    return query_gradient, key_gradient.to(keys.dtype), value_gradient.to(values.dtype)


def _scores(
    queries: Tensor, keys: Tensor, scale: float, start: int, end: int, *, is_causal: bool, mask: Tensor | None
) -> Tensor:
    """`[B, k, (h / k) (end - start), K]`, -inf where a query does not see a key."""
    scores = (_fold(queries, keys, start, end) @ keys.transpose(-1, -2)).mul_(scale)
    if is_causal:
        is_later = torch.ones(end - start, keys.shape[2], dtype=torch.bool, device=keys.device).triu(start + 1)
        scores.view(*scores.shape[:2], -1, *is_later.shape).masked_fill_(is_later, -torch.inf)
    if mask is not None:
        scores.view(*scores.shape[:2], -1, end - start, keys.shape[2]).add_(mask[:, :, None, start:end])
    return scores


def _chunks(queries: Tensor, keys: Tensor) -> list[tuple[int, int]]:
    """Ranges of queries whose scores, over all heads, are not more than `MAX_SCORES`."""
    batch, heads, size, _ = queries.shape
    step = max(1, MAX_SCORES // max(1, batch * heads * keys.shape[2]))
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def _fold(tensor: Tensor, keys: Tensor, start: int, end: int) -> Tensor:
    """`[B, h, L, D]` to `[B, k, (h / k) (end - start), D]`: the query heads of one key head after each other."""
    return _widen(tensor[:, :, start:end]).reshape(len(tensor), keys.shape[1], -1, tensor.shape[-1])


def _unfold(tensor: Tensor, queries: Tensor, size: int) -> Tensor:
    """The reverse of `_fold`."""
    return tensor.reshape(*queries.shape[:2], size, tensor.shape[-1])


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(_exact(tensor))


def _exact(tensor: Tensor) -> torch.dtype:
    """Scores of half precision are computed in float32."""
    return tensor.dtype if tensor.dtype in (torch.float32, torch.float64) else torch.float32
