"""Who sees whom in a packed row, and the short texts of a row side by side.

Tokens of a *block* see each other causally; tokens of a *link* see a whole prompt besides. Short blocks would each cost
more to call for than to compute, so those of like length are computed together, and short *families* too: a prompt with
all its completions, where a mask says which of them see each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

SMALL_BLOCK = 64  # tokens: shorter ones are computed side by side
SMALL_FAMILY = 128  # tokens of a prompt and all its completions


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `end` (exclusive) of a row."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Link:
    """All of `tokens` see all of `prompt`."""

    tokens: Span
    prompt: Span


@dataclass(frozen=True, slots=True)
class Bucket:
    """Short texts side by side, `size` columns each, padded by their own last tokens.

    `rows` `[B * size]` are the row's tokens; `real` `[K]` says which of those are no padding, `tokens` `[K]` their
    places in the row. `mask` `[B, 1, size, size]` is added to the scores: 0 or -inf; None is causal.
    """

    size: int
    rows: Tensor
    real: Tensor
    tokens: Tensor
    mask: Tensor | None = None

    def gather(self, tensor: Tensor, *, pad_with_zero: bool = False) -> Tensor:
        """`[1, h, T, D]` to `[B, h, size, D]`."""
        taken = tensor[0].index_select(1, self.rows)
        if pad_with_zero:
            kept = torch.zeros_like(taken)
            kept[:, self.real] = taken[:, self.real]
            taken = kept
        return taken.view(len(taken), -1, self.size, taken.shape[-1]).transpose(0, 1)

    def scatter(self, found: Tensor, whole: Tensor) -> None:
        """`[B, h, size, D]` into its places in `whole` `[1, h, T, D]`."""
        flat = found.transpose(0, 1).flatten(1, 2)
        whole[0].index_copy_(1, self.tokens, flat.index_select(1, self.real).to(whole.dtype))


def divide(
    blocks: Sequence[Span], links: Sequence[Link], device: torch.device
) -> tuple[list[Span], list[Link], list[Bucket]]:
    """What is computed one by one (long blocks, and links that no bucket holds), and what side by side."""
    families = {link.prompt.start: link for link in links if _is_small_family(link)}
    inside: set[int] = set()  # first tokens of blocks that a family's bucket computes
    spans = []
    for link in families.values():
        span = Span(link.prompt.start, link.tokens.end)
        spans.append(span)
        inside.update(block.start for block in blocks if span.start <= block.start < span.end)
    others = [block for block in blocks if block.start not in inside]
    long_blocks = [block for block in others if len(block) > SMALL_BLOCK]
    buckets = [_bucket(size, members, device) for size, members in _by_size(others, SMALL_BLOCK)]
    if spans:
        places = _places(blocks, links)
        buckets += [_bucket(size, members, device, places) for size, members in _by_size(spans, SMALL_FAMILY)]
    return long_blocks, [link for link in links if not _is_small_family(link)], buckets


def _is_small_family(link: Link) -> bool:
    return link.prompt.end == link.tokens.start and link.tokens.end - link.prompt.start <= SMALL_FAMILY


def _by_size(spans: Sequence[Span], longest: int) -> Iterator[tuple[int, list[Span]]]:
    """Those that are not longer than `longest`, by the power of two that holds them."""
    by_size: dict[int, list[Span]] = {}
    for span in spans:
        if len(span) <= longest:
            by_size.setdefault(1 << (len(span) - 1).bit_length(), []).append(span)
    yield from by_size.items()


def _places(blocks: Sequence[Span], links: Sequence[Link]) -> tuple[Tensor, Tensor]:
    """Of each token of the row: its block's first token, and its prompt's; -1 without a prompt."""
    lengths = torch.tensor([len(block) for block in blocks])
    own = torch.tensor([block.start for block in blocks]).repeat_interleave(lengths)
    prompt = torch.full_like(own, -1)
    for link in links:
        prompt[link.tokens.start : link.tokens.end] = link.prompt.start
    return own, prompt


def _bucket(
    size: int, members: Sequence[Span], device: torch.device, places: tuple[Tensor, Tensor] | None = None
) -> Bucket:
    starts = torch.tensor([member.start for member in members])[:, None]
    lengths = torch.tensor([len(member) for member in members])[:, None]
    columns = torch.arange(size)[None, :]
    rows = starts + torch.minimum(columns, lengths - 1)
    real = (columns < lengths).flatten().nonzero().flatten()
    mask = None
    if places is not None:
        own, prompt = (place[rows] for place in places)
        before = torch.ones(size, size, dtype=torch.bool).tril()
        sees = ((own[:, :, None] == own[:, None, :]) & before) | (prompt[:, :, None] == own[:, None, :])
        mask = torch.where(sees, 0.0, -torch.inf)[:, None].to(device)
    flat = rows.flatten()
    return Bucket(size=size, rows=flat.to(device), real=real.to(device), tokens=flat[real].to(device), mask=mask)
