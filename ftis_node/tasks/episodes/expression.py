"""The value of an arithmetic expression that a model wrote: exact, and with a bound on its work.

    2 * (47 + 83) / 4        numbers, + - * / and brackets

The limits count characters and digits, not seconds. So a slow machine and a fast one give the same result.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

MAX_CHARS: Final = 200
MAX_DEPTH: Final = 16
MAX_DIGITS: Final = 40  # of a number's numerator or denominator
NUM_DECIMALS: Final = 6
SCALE: Final = 1_000_000
EXPRESSION: Final = re.compile(r"[0-9(][0-9 .()]{0,40}[-+*/][0-9 .()*/+-]{0,60}[0-9)]")
"""An expression in a text. Its length is bounded, so a search takes linear time."""
_TOKEN = re.compile(r"\s*(?:(\d{1,40}(?:\.\d{1,40})?)|(.))", re.DOTALL)


class ExpressionError(Exception):
    """The text is no expression, or exceeds a limit."""


def value_of(text: str) -> str:
    """Return the value of an expression: a whole number, or a decimal with up to `NUM_DECIMALS` decimals.

    Raises ExpressionError.
    """
    if len(text) > MAX_CHARS:
        raise ExpressionError("too long")
    value = _Parser(text).value()
    whole, decimals = divmod(round(abs(value) * SCALE), SCALE)  # exact, half to even
    digits = str(decimals).rjust(NUM_DECIMALS, "0").rstrip("0")
    sign = "-" if value < 0 and (whole or decimals) else ""
    return f"{sign}{whole}.{digits}" if digits else f"{sign}{whole}"


class _Parser:
    """Recursive descent: a sum of products of signed numbers and brackets."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = [number or sign for number, sign in _TOKEN.findall(text.strip())]
        self._depth = 0

    def value(self) -> Fraction:
        value = self._sum()
        if self._tokens:
            raise ExpressionError(f"unexpected {self._tokens[0]!r}")
        return value

    def _next(self) -> str:
        return self._tokens[0] if self._tokens else ""

    def _take(self) -> str:
        if not self._tokens:
            raise ExpressionError("incomplete")
        return self._tokens.pop(0)

    def _sum(self) -> Fraction:
        value = self._product()
        while self._next() in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        return _bounded(value)

    def _product(self) -> Fraction:
        value = self._signed()
        while self._next() in ("*", "/"):
            if self._take() == "*":
                value = _bounded(value * self._signed())
            elif divisor := self._signed():
                value = _bounded(value / divisor)
            else:
                raise ExpressionError("division by zero")
        return value

    def _signed(self) -> Fraction:
        token = self._take()
        if token in ("(", "-"):
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise ExpressionError("too deep")
            value = self._sum() if token == "(" else -self._signed()
            self._depth -= 1
            if token == "(" and self._take() != ")":
                raise ExpressionError("a bracket is not closed")
            return value
        if not token[0].isascii() or not token[0].isdigit():
            raise ExpressionError(f"unexpected {token!r}")
        return Fraction(token)


def _bounded(value: Fraction) -> Fraction:
    limit = 10**MAX_DIGITS
    if abs(value.numerator) >= limit or value.denominator >= limit:
        raise ExpressionError("a number is too large")
    return value
