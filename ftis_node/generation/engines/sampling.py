"""The sampling of the next token of every row: pure functions on logits.

Each row draws by inverse transform from its own uniform number. So a request's tokens do not depend on how many other
rows are in the batch. The running sum is in float64: over a vocabulary of 150,000 the rounding of float32 is as large
as the probability of most tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ftis_node.records.group import SamplingSettings


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Sampling settings of each row, shape `[R]`: temperature (0: greedy), top_p (1: off), top_k (0: off)."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor

    @classmethod
    def of(cls, settings: Sequence[SamplingSettings], device: torch.device) -> RowSettings:
        """Return one row for each of `settings`."""
        return cls(
            temperature=torch.tensor([each.temperature for each in settings], dtype=torch.float32, device=device),
            top_p=torch.tensor([each.top_p for each in settings], dtype=torch.float32, device=device),
            top_k=torch.tensor([each.top_k for each in settings], dtype=torch.int64, device=device),
        )


def choose_tokens(logits: Tensor, settings: RowSettings, uniforms: Tensor, *, num_ids: int) -> tuple[Tensor, Tensor]:
    """Sample one token for each row.

    `logits` `[R, V]`, `uniforms` `[R]` float64 in [0, 1); only ids below `num_ids` are sampled. Returns ids `[R]` int64
    and their log-probs `[R]` float32 under the full softmax over all V at the row's temperature (1 if it is 0).
    """
    is_greedy = settings.temperature <= 0
    scale = torch.where(is_greedy, 1.0, settings.temperature)
    logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    candidates = logprobs[:, :num_ids]
    if bool(is_greedy.all()):
        ids = candidates.argmax(dim=-1)
    else:
        ids = draw(keep_likely(candidates.exp(), settings), uniforms)
        if bool(is_greedy.any()):
            ids = torch.where(is_greedy, candidates.argmax(dim=-1), ids)
    return ids, logprobs.gather(-1, ids[:, None]).squeeze(-1)


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Draw ids `[R]` from rows of `[R, V]` that need not sum to 1, by inverse transform of `uniforms` `[R]`."""
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    targets = uniforms * cumulative[:, -1]
    # The first id whose running sum exceeds the target: an id of probability 0 adds nothing, so it is never chosen.
    ids = torch.searchsorted(cumulative, targets[:, None], right=True).squeeze(-1)
    return ids.clamp(max=probabilities.shape[-1] - 1)


def keep_likely(probabilities: Tensor, settings: RowSettings) -> Tensor:
    """Return `[R, V]` with everything outside top_k and top_p set to 0; the most likely id of a row always stays.

    top_p keeps the smallest set of the most likely ids whose probabilities reach it, after top_k.
    """
    if bool((settings.top_p >= 1).all()) and bool((settings.top_k <= 0).all()):
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    outside_k = (settings.top_k > 0)[:, None] & (ranks >= settings.top_k[:, None])
    ordered = ordered.masked_fill(outside_k, 0.0)
    share_before = (ordered.cumsum(dim=-1) - ordered) / ordered.sum(dim=-1, keepdim=True)
    outside_p = (settings.top_p < 1)[:, None] & (share_before >= settings.top_p[:, None]) & (ranks > 0)
    return torch.zeros_like(probabilities).scatter_(-1, order, ordered.masked_fill(outside_p, 0.0))
