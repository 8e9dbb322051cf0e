"""Attention over texts packed into one row, in which several completions share a prompt.

    prompt p1 p2 p3 | a1 a2 | b1 | c1 c2 c3        texts: p a, p b, p c

Each text is gathered from the row with its prompt. Texts of similar length form a bucket: right-padded, causal, one
call of `F.scaled_dot_product_attention`. Causal attention hides the padding, so no mask is built. Only texts longer
than a sliding window get one. Outputs of a shared prompt are equal in all its texts, and the last text provides them.
On a GPU similar buckets are merged, because the host needs longer to launch a bucket's operations than the GPU to
compute short texts. If torch has a kernel for texts of different lengths there, it replaces the buckets (`varlen.py`).

A soft cap on the scores (Gemma 2) is in no fused kernel of torch. Such attention computes the matrix of all scores of
a few texts, and again in the backward pass. Its time and memory grow with the square of a text's length.

transformers calls `attend` under the name `ATTENTION` and passes `plan` through the model's forward arguments. Without
a plan, rows are plain texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from ftis_node.learner.batch import on_device
from ftis_node.learner.model import varlen
from ftis_node.learner.model.varlen import TextColumns

ATTENTION = "ftis_packed"
UNSUPPORTED = {"s_aux": "sinks", "position_bias": "a position bias"}  # terms that other models add
MAX_SCORES = 1 << 25  # of soft-capped attention at once, in all heads: 128 MiB in float32, about five times
MIN_LENGTH = 16  # tokens: all shorter texts share one bucket
MAX_PADDING = 1.25  # columns of a merged bucket relative to its tokens: memory grows with the columns
# The fixed cost of a bucket, in query-key pairs. An estimate: its operations take the host about 0.25 ms a layer. A GPU
# of 200 TFLOP/s computes eight million pairs in 14 heads of 64 meanwhile, a CPU a thousand.
BUCKET_PAIRS = {"cpu": 0, "cuda": 1 << 20}


class LengthBucket(NamedTuple):
    """`num_texts` texts of similar length as one batch of `size` columns."""

    num_texts: int
    size: int


class AttentionTerms(NamedTuple):
    """The scale of the scores (None: 1 / sqrt(D)), the tokens that a token sees with itself, and the soft cap."""

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The buckets of one row of T tokens, whose R columns are gathered together.

    `rows` `[R]` are the columns' positions in the row, each text padded with its own last token. `source` `[T]` is the
    column that provides each token's output. A row of one text has no buckets and needs no gathering. `columns` are the
    texts for a kernel that needs no buckets; None: there is none.
    """

    buckets: tuple[LengthBucket, ...]
    rows: Tensor
    source: Tensor
    columns: TextColumns | None = None

    @classmethod
    def of(cls, texts: Sequence[tuple[range, ...]], device: torch.device) -> AttentionPlan:
        """Return the plan for `texts`, each as its columns of the row in order; together they cover the row."""
        by_length: dict[int, list[NDArray[np.int64]]] = {}
        columns = None
        if len(texts) > 1:
            every = [np.concatenate([np.arange(part.start, part.stop) for part in parts]) for parts in texts]
            columns = TextColumns.of(every, device) if varlen.is_available(device) else None
            merged = merged_classes(list(map(len, every)), BUCKET_PAIRS.get(device.type, 0))
            for places in every:
                by_length.setdefault(merged[_length_class(len(places))], []).append(places)
        buckets = tuple(LengthBucket(len(members), max(map(len, members))) for members in by_length.values())
        rows = np.zeros(sum(bucket.num_texts * bucket.size for bucket in buckets), dtype=np.int64)
        source = np.zeros(max(part.stop for parts in texts for part in parts) if buckets else 0, dtype=np.int64)
        column = 0
        for members, (_, size) in zip(by_length.values(), buckets, strict=True):
            for places in members:
                rows[column : column + size] = places[-1]
                rows[column : column + len(places)] = places
                source[places] = np.arange(column, column + len(places))
                column += size
        rows_there, source_there = (on_device(torch.from_numpy(each), device) for each in (rows, source))
        return cls(buckets, rows_there, source_there, columns)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, terms: AttentionTerms) -> Tensor:
        """Map `[1, h, T, D]` queries and `[1, k, T, D]` keys and values to `[1, T, h, D]`; h is a multiple of k."""
        if self.columns is not None and terms.soft_cap is None and varlen.supports(query, value):
            return self.columns.attend(query, key, value, scale=terms.scale, window=terms.window)
        if not self.buckets:
            return _causal(query, key, value, terms).transpose(1, 2)
        batches = zip(self._batches(query), self._batches(key), self._batches(value), strict=True)
        outputs = [_causal(*batch, terms).transpose(1, 2).flatten(0, 1) for batch in batches]
        return torch.cat(outputs).index_select(0, self.source)[None]

    def _batches(self, tensor: Tensor) -> list[Tensor]:
        """Gather `[1, h, T, D]` into one `[num_texts, h, size, D]` a bucket."""
        # The gradient of `tensor[0]` would fill a tensor of the whole row; `squeeze` is a view.
        taken = tensor.squeeze(0).transpose(0, 1).index_select(0, self.rows)
        parts = torch.split(taken, [bucket.num_texts * bucket.size for bucket in self.buckets])
        return [
            part.view(*bucket, *part.shape[1:]).transpose(1, 2)
            for part, bucket in zip(parts, self.buckets, strict=True)
        ]


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    plan: AttentionPlan | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers' attention interface: `[N, h, T, D]` queries to `[N, T, h, D]`.

    N is 1 with a plan. Raises NotImplementedError for a model that passes other terms, such as a bias, to attention.
    """
    if found := [words for name, words in UNSUPPORTED.items() if more.get(name) is not None]:
        raise NotImplementedError(f"its attention has {found[0]}")
    assert attention_mask is None, "rows are causal texts, padded on the right"
    terms = AttentionTerms(scaling, sliding_window, softcap)
    if plan is None:
        return _causal(query, key, value, terms).transpose(1, 2), None
    return plan.attend(query, key, value, terms), None


def register(function: Callable[..., tuple[Tensor, None]] = attend) -> None:
    """Register `ATTENTION` with transformers, which builds no mask for it."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, function)


def _causal(query: Tensor, key: Tensor, value: Tensor, terms: AttentionTerms) -> Tensor:
    """Map `[N, h, T, D]` queries and `[N, k, T, D]` keys and values of N causal texts to `[N, h, T, D]`."""
    (_, num_heads, length, _), num_key_heads = query.shape, key.shape[1]
    scale, window, soft_cap = terms
    crosses_window = window is not None and window < length
    if soft_cap is None and not crosses_window:
        is_grouped = num_heads != num_key_heads
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped)
    mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_()
    if window is not None and crosses_window:
        mask = mask.triu_(1 - window)
    # With a mask, no fused kernel shares keys between heads.
    key, value = (each.repeat_interleave(num_heads // num_key_heads, dim=1) for each in (key, value))
    if soft_cap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    at_once = max(1, MAX_SCORES // (num_heads * length**2))
    outputs = [
        checkpoint(_soft_capped, *part, mask, scale, soft_cap, use_reentrant=False, preserve_rng_state=False)
        for part in zip(*(torch.split(each, at_once) for each in (query, key, value)), strict=True)
    ]
    return torch.cat(outputs)


def _soft_capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, soft_cap: float) -> Tensor:
    """Map `[N, h, T, D]` queries, keys and values to `[N, h, T, D]`; the softmax is in float32 or better."""
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scale / soft_cap)) * soft_cap
    exact = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1, dtype=exact)
    return weights.to(value.dtype) @ value


def merged_classes(lengths: Sequence[int], bucket_pairs: int) -> dict[int, int]:
    """Return the bucket of each length class of `lengths`, named by its largest class.

    Neighboring classes share a bucket if that costs least: the query-key pairs, and `bucket_pairs` for each bucket.
    """
    members: dict[int, list[int]] = {}
    for length in sorted(lengths):
        members.setdefault(_length_class(length), []).append(length)
    classes = list(members)
    best: list[tuple[int, int]] = [(0, 0)]  # of the first n classes: the cost, and where its last bucket begins
    for end in range(1, len(classes) + 1):
        choices = []
        for begin in range(end):
            inside = [length for each in classes[begin:end] for length in members[each]]
            columns = len(inside) * inside[-1]
            if begin == end - 1 or columns <= MAX_PADDING * sum(inside):
                choices.append((best[begin][0] + columns * inside[-1] + bucket_pairs, begin))
        best.append(min(choices))
    merged: dict[int, int] = {}
    end = len(classes)
    while end:
        begin = best[end][1]
        merged |= dict.fromkeys(classes[begin:end], classes[end - 1])
        end = begin
    return merged


def _length_class(length: int) -> int:
    """Return `length` rounded up to three significant bits, so that padding adds at most a quarter."""
    step = 1 << max(0, length.bit_length() - 3)
    return max(MIN_LENGTH, -(-length // step) * step)
