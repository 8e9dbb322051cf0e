"""Muon for the tiny models' matrices: orthogonalized momentum as the update (Jordan et al., 2024).

`torch.optim.Muon` has the same rule, but uses bfloat16, which many CPUs emulate, and one matrix at a time. Here
matrices of one shape are iterated together in float32, about four times as fast on one core.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.nn import Parameter

MOMENTUM: Final = 0.95
NUM_ITERATIONS: Final = 5
COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)  # of the quintic Newton-Schulz iteration, from the reference code
SMALLEST_NORM: Final = 1e-7


class Muon:
    """Optimizer that updates matrices in place; all must have gradients at `step`."""

    def __init__(self, matrices: Iterable[Parameter]) -> None:
        by_shape = groupby(sorted(matrices, key=lambda matrix: matrix.shape), key=lambda matrix: matrix.shape)
        self._stacks = [list(stack) for _, stack in by_shape]
        self._momenta = [torch.zeros(len(stack), *stack[0].shape) for stack in self._stacks]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update with Nesterov momentum; a tall matrix takes a longer step, by the root of its aspect ratio."""
        for stack, momentum in zip(self._stacks, self._momenta, strict=True):
            gradients = torch.stack([matrix.grad for matrix in stack if matrix.grad is not None])
            momentum.lerp_(gradients, 1 - MOMENTUM)
            updates = orthogonalise(gradients.lerp(momentum, MOMENTUM))
            rows, columns = stack[0].shape
            for matrix, update in zip(stack, updates, strict=True):
                matrix.sub_(update, alpha=learning_rate * math.sqrt(max(1.0, rows / columns)))


def orthogonalise(matrices: Tensor) -> Tensor:
    """Bring all singular values of [K, R, C] `matrices` near one without changing their directions."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if tall else matrices
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + SMALLEST_NORM)
    first, third, fifth = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        square = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(square, square, square, beta=third, alpha=fifth), wide, beta=first)
    return wide.mT if tall else wide
