"""Attention over texts packed into one row, in which several completions share a prompt.

    prompt p1 p2 p3 | a1 a2 | b1 | c1 c2 c3        texts: p a, p b, p c

Each text is gathered from the row with its prompt. Texts of similar length form a bucket: right-padded, causal, one
call of `F.scaled_dot_product_attention`. A causal mask hides the padding, so no mask is ever built. The outputs return
to the row. Outputs of a shared prompt are equal in all its texts, and the first text provides them.

transformers calls `attend` under the name `ATTENTION` and passes `plan` through the model's forward arguments. Without
a plan, rows are plain texts and transformers' own SDPA attention computes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ftis_node.learner.data.batch import SequenceSpan

ATTENTION = "ftis_packed"
UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")  # terms that other models add to attention
MIN_LENGTH = 16  # tokens: all shorter texts share one bucket


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Texts of similar length as one batch: B texts of `size` columns, each padded with its own last token.

    `rows` `[B * size]` are positions in the packed row. `kept` `[K]` are the entries of `rows` whose output is used.
    """

    size: int
    rows: Tensor
    kept: Tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """Gather `[1, h, T, D]` into `[B, h, size, D]`."""
        taken = tensor[0].index_select(1, self.rows)
        return taken.view(len(taken), -1, self.size, taken.shape[-1]).transpose(0, 1)

    def pick(self, output: Tensor) -> Tensor:
        """Select from `[B, h, size, D]` the outputs that are used, `[K, h, D]`."""
        return output.transpose(1, 2).flatten(0, 1).index_select(0, self.kept)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The buckets of one row. `order` `[T]` sorts their concatenated outputs by position in the row.

    A row of one text has no buckets and needs no gathering.
    """

    buckets: tuple[LengthBucket, ...]
    order: Tensor

    @classmethod
    def of(cls, texts: Sequence[tuple[SequenceSpan, ...]], device: torch.device) -> AttentionPlan:
        """Return the plan for `texts`, each as its spans of the row in order; together they cover the row."""
        if len(texts) == 1:
            return cls((), torch.zeros(0, dtype=torch.int64, device=device))
        by_length: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for places, is_new in _places(texts):
            by_length.setdefault(_length_class(len(places)), []).append((places, is_new))
        buckets = [_bucket(members) for members in by_length.values()]
        order = torch.cat([bucket.rows[bucket.kept] for bucket in buckets]).argsort()
        on_device = [LengthBucket(each.size, each.rows.to(device), each.kept.to(device)) for each in buckets]
        return cls(tuple(on_device), order.to(device))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Map `[1, h, T, D]` queries and `[1, k, T, D]` keys and values to `[1, T, h, D]`; h is a multiple of k."""
        if not self.buckets:
            return _causal(query, key, value, scale).transpose(1, 2)
        outputs = [
            bucket.pick(_causal(bucket.gather(query), bucket.gather(key), bucket.gather(value), scale))
            for bucket in self.buckets
        ]
        return torch.cat(outputs).index_select(0, self.order)[None]


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
    """Compute attention for transformers' attention interface: `[1, h, T, D]` queries to `[1, T, h, D]`.

    Raises NotImplementedError for a model that passes other terms, such as a bias, to attention.
    """
    if plan is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output: Tensor
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)
        return output, None
    if found := [name for name in UNSUPPORTED if more.get(name) is not None]:
        raise NotImplementedError(f"attention with {found[0]} over packed sequences")
    return plan.attend(query, key, value, scaling), None


def register(function: Callable[..., tuple[Tensor, None]] = attend) -> None:
    """Register `ATTENTION` with transformers, which builds no mask for it."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, function)


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    is_grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped)


def _places(texts: Sequence[tuple[SequenceSpan, ...]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the positions of each text's tokens in the row, and which of them no earlier text has."""
    seen: set[SequenceSpan] = set()
    for spans in texts:
        places = torch.cat([torch.arange(span.start, span.end) for span in spans])
        yield places, torch.cat([torch.full((len(span),), span not in seen) for span in spans])
        seen.update(spans)


def _length_class(length: int) -> int:
    """Return `length` rounded up to three significant bits, so that padding adds at most a quarter."""
    step = 1 << max(0, length.bit_length() - 3)
    return max(MIN_LENGTH, -(-length // step) * step)


def _bucket(members: Sequence[tuple[Tensor, Tensor]]) -> LengthBucket:
    size = max(len(places) for places, _ in members)
    rows = torch.cat([torch.cat([places, places[-1:].expand(size - len(places))]) for places, _ in members])
    kept = torch.cat([torch.cat([is_new, is_new.new_zeros(size - len(is_new))]) for _, is_new in members])
    return LengthBucket(size, rows, kept.nonzero().flatten())
