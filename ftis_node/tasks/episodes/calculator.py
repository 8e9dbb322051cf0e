"""Episode `calculator`: products of two-digit numbers with a calculator, for language models from about 100 M.

    prompt        system: how to use the calculator; user: "What is 47 times 83?"
    text          "47 * 83"     observation   "3901"
    text          "47 times 83 is 3901."

A small model cannot multiply such numbers in its head, so it must learn to use the tool. A text with an expression is a
call. Its observation is the value of the first one, or "error: ...". A text without an expression is the answer and
ends the episode. The reward is 1 if the text's last number is the product, else 0.

An expression has numbers, + - * / and brackets. Its value is exact. The limits count characters and digits, not
seconds. So a slow machine and a fast one give the same result.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Final, NamedTuple

from ftis_node.records.think_block import after_thinking
from ftis_node.tasks.base import TaskItem, asked
from ftis_node.tasks.problems import HELD_OUT_ONE_IN, DrawnTask, Prompt, stable_hash
from ftis_node.tasks.words import last_number

OPERANDS: Final = range(11, 100)
SYSTEM_PROMPT: Final = (
    "You have a calculator. Write an expression, such as 12 * 34, and you get its value. "
    "Then answer in one short sentence."
)
MAX_CHARS_READ: Final = 2000  # of a text
MAX_CHARS: Final = 200  # of an expression
MAX_DEPTH: Final = 16
MAX_DIGITS: Final = 40  # of a number's numerator or denominator
NUM_DECIMALS: Final = 6
SCALE: Final = 1_000_000
EXPRESSION: Final = re.compile(r"[0-9(][0-9 .()]{0,40}[-+*/][0-9 .()*/+-]{0,60}[0-9)]")
"""An expression in a text. Its length is bounded, so a search takes linear time."""
_TOKEN = re.compile(r"\s*(?:(\d{1,40}(?:\.\d{1,40})?)|(.))", re.DOTALL)


class Product(NamedTuple):
    """Two numbers of two digits."""

    left: int
    right: int

    @property
    def is_held_out(self) -> bool:
        """Return whether the problem, or the same with exchanged operands, is held out."""
        return stable_hash(f"{max(self)}*{min(self)}") % HELD_OUT_ONE_IN == 0


class CalculatorEpisode(DrawnTask[Product]):
    """A split of `calculator`, as an `Episode` without a state."""

    family = "calculator"
    num_test = 256

    def draw(self, seed: str) -> Product:
        rest, left = divmod(stable_hash(seed), len(OPERANDS))
        return Product(OPERANDS[left], OPERANDS[rest % len(OPERANDS)])

    def prompt_and_answer(self, index: int) -> tuple[Prompt, str]:
        left, right = self.problem(index)
        return asked(f"What is {left} times {right}?", SYSTEM_PROMPT), str(left * right)

    def begin(self, item: TaskItem) -> None:
        return None

    def step(self, state: None, text: str) -> tuple[str | None, None]:
        expression = _expression_in(after_thinking(text))
        if expression is None:
            return None, None
        try:
            return value_of(expression), None
        except ExpressionError as error:
            return f"error: {error}", None

    def answer_of(self, item: TaskItem, text: str) -> str | None:
        return last_number(after_thinking(text))

    def score(self, item: TaskItem, texts: Sequence[str]) -> float:
        answer = after_thinking(texts[-1])
        return 1.0 if _expression_in(answer) is None and last_number(answer) == item.answer else 0.0


def _expression_in(text: str) -> str | None:
    """Return the first expression in a text; None if there is none."""
    found = EXPRESSION.search(text[:MAX_CHARS_READ])
    return found[0] if found else None


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
