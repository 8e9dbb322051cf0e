"""Weights of a mixture or of several rewards, as whole numbers in the same proportions."""

from __future__ import annotations

import re
from fractions import Fraction
from math import gcd, lcm
from typing import TYPE_CHECKING, Final

from ftis_node.errors import TaskError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_TOTAL_WEIGHT: Final = 1000  # after reduction; bounds the length of a mixture's pattern
NUMBER: Final = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"


def parse_weight(text: str) -> Fraction | None:
    """Return the weight in decimal digits; None if the text is no number."""
    return Fraction(text) if re.fullmatch(NUMBER, text) else None


def whole_weights(weights: Sequence[Fraction], text: str) -> list[int]:
    """Return the smallest whole numbers in the same proportions. Raises TaskError if their sum is too large."""
    scale = lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    divisor = gcd(*whole)
    reduced = [weight // divisor for weight in whole]
    if sum(reduced) > MAX_TOTAL_WEIGHT:
        raise TaskError(
            f"the weights in {text!r} are too far apart: in whole numbers they add up to {sum(reduced):,}, "
            f"at most {MAX_TOTAL_WEIGHT:,}"
        )
    return reduced
