"""Triton kernels of the output head's elementwise work: each reads a logit once, and the second writes it once.

    forward     log-sum-exp of a row in one pass, and the chosen logit
    backward    (onehot - softmax) * share in one pass, written in the number format of the next product

The running maximum m and sum s of a row follow Milakov and Gimelshein (arXiv 1805.02867). For each block of logits z,
s becomes s exp(m - m') + sum exp(z - m') with m' = max(m, max z). `logprobs.py` has the same operation by operation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits of a row at once
NUM_WARPS = 8
TOLERANCE = 1e-4  # of the trial


@triton.jit  # type: ignore[untyped-decorator]
def _log_sum_kernel(logits, ids, chosen, log_sums, factor, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * width
    columns = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        values = tl.load(at + start + columns, mask=inside, other=float("-inf")) * factor
        new_largest = tl.maximum(largest, tl.max(values, axis=0))
        terms = tl.where(inside, tl.exp(values - new_largest), 0.0)
        total = total * tl.exp(largest - new_largest) + tl.sum(terms, axis=0)
        largest = new_largest
    tl.store(log_sums + row, tl.log(total) + largest)
    tl.store(chosen + row, tl.load(at + tl.load(ids + row)) * factor)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits, ids, log_sums, shares, out, factor, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    share = tl.load(shares + row)
    values = tl.load(logits + row * width + columns, mask=inside, other=0.0) * factor
    scores = tl.exp(values - tl.load(log_sums + row)) * -share
    scores += tl.where(columns == tl.load(ids + row), share, 0.0)
    tl.store(out + row * width + columns, scores.to(out.dtype.element_ty), mask=inside)


def chosen_and_log_sum(logits: Tensor, ids: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return the logits of `[K]` ids and the log-sum-exp, both `[K]`, of `[K, V]` float32 logits times `factor`."""
    num_rows, width = logits.shape
    chosen, log_sums = logits.new_empty(2, num_rows)
    _log_sum_kernel[(num_rows,)](logits, ids, chosen, log_sums, factor, width, BLOCK=_block(width), num_warps=NUM_WARPS)
    return chosen, log_sums


def logits_gradient(
    logits: Tensor, ids: Tensor, log_sums: Tensor, shares: Tensor, factor: float, dtype: torch.dtype
) -> Tensor:
    """Return (onehot - softmax) * share as `dtype`, `[K, V]`; in place if that is the logits' own."""
    num_rows, width = logits.shape
    out = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    grid = (num_rows, triton.cdiv(width, _block(width)))
    _gradient_kernel[grid](logits, ids, log_sums, shares, out, factor, width, BLOCK=_block(width), num_warps=NUM_WARPS)
    return out


def check(device: torch.device) -> None:
    """Run both kernels. Raises an error of any kind if they cannot be compiled, RuntimeError if they are wrong."""
    logits, ids = torch.randn(3, BLOCK + 9, device=device), torch.tensor([0, 5, BLOCK + 8], device=device)
    chosen, log_sums = chosen_and_log_sum(logits, ids, 1.0)
    found = logits_gradient(logits.clone(), ids, log_sums, torch.ones_like(log_sums), 1.0, torch.float32)
    expected = torch.nn.functional.one_hot(ids, BLOCK + 9) - logits.softmax(-1)
    errors = (chosen - log_sums - logits.log_softmax(-1).gather(1, ids[:, None])[:, 0], found - expected)
    largest = max(float(error.abs().max()) for error in errors)
    if not largest < TOLERANCE:
        raise RuntimeError(f"they are off by {largest:.2g}")


def _block(width: int) -> int:
    return min(BLOCK, int(triton.next_power_of_2(width)))
