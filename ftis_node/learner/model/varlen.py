"""Attention over the packed texts of a row by a GPU's kernel for texts of different lengths: one call, no padding.

    row       prompt p1 p2 p3 | a1 a2 | b1            texts: p a, p b
    columns   p1 p2 p3 a1 a2 | p1 p2 p3 b1            starts: 0, 5, 9

`torch.nn.attention.varlen` is one custom operation for `torch.compile`, so a decoder layer stays one graph. The lengths
are a tensor and the gathers have fixed forms, so a micro-batch of other texts is no other program.

The gradient of a shared prompt is the sum over its copies, gathered side by side. The gradient of `index_select` would
add them by atomic operations in bfloat16, each rounded, in an order that differs from run to run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import scaled_dot_product_attention

from ftis_node.errors import first_line
from ftis_node.learner.batch import on_device

log = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)  # of the kernel
MAX_HEAD_SIZE, MAX_HEAD_SIZE_ON_ALL = 256, 192  # the backward pass of larger ones needs an A100 or an H100 and newer
TOLERANCE = 0.05  # of the trial's output and gradient in bfloat16, relative


class TextColumns(NamedTuple):
    """The N texts of a row of T tokens, one after the other in R columns.

    rows     [R]     position of each column in the row
    source   [T]     column that provides each token's output, of its last text
    starts   [N + 1] int32, first column of each text, then R
    shared   [P]     positions that are in several texts
    copies   [P, C]  their columns; where there are fewer than C, any column with the weight 0
    weights  [P, C]  bool
    longest          columns of the longest text
    """

    rows: Tensor
    source: Tensor
    starts: Tensor
    shared: Tensor
    copies: Tensor
    weights: Tensor
    longest: int

    @classmethod
    def of(cls, texts: Sequence[NDArray[np.int64]], device: torch.device) -> TextColumns:
        """Return the columns of `texts`, each as its positions in the row in order."""
        rows = np.concatenate(texts)
        order, counts = np.argsort(rows, kind="stable"), np.bincount(rows)
        ends = np.cumsum(counts)
        shared = np.flatnonzero(counts > 1)
        places = np.arange(max(2, counts.max()))
        weights = places < counts[shared, None]
        copies = order[np.where(weights, (ends - counts)[shared, None] + places, 0)]
        starts = np.cumsum([0, *map(len, texts)], dtype=np.int32)
        arrays = (rows, order[ends - 1], starts, shared, copies, weights)
        tensors = [on_device(torch.from_numpy(np.ascontiguousarray(each)), device) for each in arrays]
        return cls._make([*tensors, max(map(len, texts))])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None) -> Tensor:
        """Map `[1, h, T, D]` queries and `[1, k, T, D]` keys and values to `[1, T, h, D]`; h is a multiple of k."""
        query, key, value = (
            Gather.apply(  # type: ignore[no-untyped-call]
                tensor.squeeze(0).transpose(0, 1), self.rows, self.source, self.shared, self.copies, self.weights
            )
            for tensor in (query, key, value)
        )
        seen, longest, starts = -1 if window is None else window - 1, self.longest, self.starts
        output: Any = _varlen_attn()(
            query, key, value, starts, starts, longest, longest, scale=scale, window_size=(seen, 0), **GROUPED
        )
        attended: Tensor = output.index_select(0, self.source)[None]
        return attended


class Gather(Function):
    """An autograd function for `tensor[rows]`, `[T, h, D]` to `[R, h, D]`; the others are fields of `TextColumns`."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, rows: Tensor, source: Tensor, shared: Tensor, copies: Tensor, weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(source, shared, copies, weights)
        return tensor.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        source, shared, copies, weights = ctx.saved_tensors
        gradient = gradients[0]
        sums = gradient[copies].mul_(weights[..., None, None]).sum(dim=1)  # in bfloat16 too, torch adds in float32
        total = gradient.index_select(0, source).index_copy(0, shared, sums)
        return total, None, None, None, None, None


def _varlen_attn() -> Any:
    from torch.nn.attention.varlen import varlen_attn  # some versions of torch have none

    return varlen_attn


def _grouped() -> dict[str, bool]:
    """Return the option for fewer keys than queries. Torch before 2.12 has none, and groups them without it."""
    try:
        return {"enable_gqa": True} if "enable_gqa" in signature(_varlen_attn()).parameters else {}
    except ImportError:
        return {}


GROUPED = _grouped()


def supports(query: Tensor, value: Tensor) -> bool:
    """Return whether the kernel computes this number format and these head sizes, also backwards."""
    size = query.shape[-1]
    if query.dtype not in DTYPES or size % 8 or size != value.shape[-1] or size > MAX_HEAD_SIZE:
        return False
    return size <= MAX_HEAD_SIZE_ON_ALL or not query.is_cuda or _is_large_card(query.device)


@cache
def _is_large_card(device: torch.device) -> bool:
    capability = torch.cuda.get_device_capability(device)
    return capability == (8, 0) or capability >= (9, 0)


@cache
def is_available(device: torch.device) -> bool:
    """Return whether `device` has the kernel. A trial decides, whose result is compared with other attention."""
    if device.type != "cuda":
        return False
    try:
        if not {"window_size", "scale"} <= signature(_varlen_attn()).parameters.keys():
            raise RuntimeError("this version of torch has no windows in it")
        with torch.enable_grad():
            error = _trial_error(device)
    except (ImportError, RuntimeError, TypeError, ValueError) as problem:
        log.warning(
            "attention in buckets: torch's attention for texts of different lengths fails: %s", first_line(problem)
        )
        return False
    if not error < TOLERANCE:
        log.warning("attention in buckets: torch's attention for texts of different lengths is off by %.2g", error)
    return error < TOLERANCE


def _trial_error(device: torch.device) -> float:
    """Return the largest relative error of output and gradients for two texts with a common prompt."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 90, 64), (1, 2, 90, 64), (1, 2, 90, 64))
    tensors = [torch.randn(shape, generator=generator).to(device, torch.bfloat16).requires_grad_() for shape in shapes]
    prompt, texts = np.arange(30), (np.arange(30, 70), np.arange(70, 90))
    columns = TextColumns.of([np.concatenate([prompt, text]) for text in texts], device)
    mask = torch.zeros(90, 90, dtype=torch.bool)
    for text in texts:
        places = np.concatenate([prompt, text])
        mask[np.ix_(places, places)] = True
    mask = mask.tril().to(device)
    query, key, value = tensors
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    found = columns.attend(query, key, value, scale=None, window=None)
    pairs = [(found, expected)]
    pairs += zip(
        *(torch.autograd.grad(made.float().square().sum(), tensors) for made in (found, expected)), strict=True
    )
    return max(float((one - other).detach().float().norm() / other.detach().float().norm()) for one, other in pairs)
