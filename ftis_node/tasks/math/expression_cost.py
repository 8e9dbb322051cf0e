"""Bounds of the value of an expression; the arithmetic behind `expression_limits.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

WORST: Final = 1e9  # beyond every limit; costs stay below its square, far from overflow
_COUNTED_TO: Final = 1000  # bounds counted terms and exponents; more exceed every limit


@dataclass(frozen=True, slots=True)
class ExpressionCost:
    """Bounds of an expression: bits of its largest number, terms above and below its fraction line."""

    bits: float = 1.0
    terms: float = 1.0
    below: float = 1.0

    @property
    def value(self) -> float:
        """Return its largest possible value as an exponent."""
        return float(2.0 ** min(self.bits, 30.0))

    def plus(self, other: ExpressionCost) -> ExpressionCost:
        """Return the bounds of a sum over one fraction line."""
        terms = self.terms * other.below + other.terms * self.below
        return capped(max(self.bits, other.bits) + 1.0, terms, self.below * other.below)

    def times(self, other: ExpressionCost) -> ExpressionCost:
        return capped(self.bits + other.bits, self.terms * other.terms, self.below * other.below)

    def over(self, other: ExpressionCost) -> ExpressionCost:
        return self.times(ExpressionCost(other.bits, other.below, other.terms))

    def to_the(self, exponent: ExpressionCost) -> ExpressionCost:
        times = exponent.value
        return capped(
            max(1.0, self.bits) * times, _multiplied_out(self.terms, times), _multiplied_out(self.below, times)
        )


def capped(bits: float, terms: float, below: float) -> ExpressionCost:
    return ExpressionCost(min(bits, WORST), min(terms, WORST), min(below, WORST))


def _multiplied_out(terms: float, times: float) -> float:
    """Return the number of terms of a sum of `terms` to the power of `times`."""
    if terms <= 1.0:
        return 1.0
    if times > _COUNTED_TO or terms > _COUNTED_TO:
        return WORST
    return min(WORST, float(math.comb(int(terms) + math.ceil(times) - 1, math.ceil(times))))
