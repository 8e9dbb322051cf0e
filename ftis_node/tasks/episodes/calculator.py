"""Episode `calculator`: products of two-digit numbers with a calculator, for language models from about 100 M.

    prompt        system: how to use the calculator; user: "What is 47 times 83?"
    text          "47 * 83"     observation   "3901"
    text          "47 times 83 is 3901."

A small model cannot multiply such numbers in its head, so it must learn to use the tool. A text with an expression is a
call. Its observation is the value of the first one, or "error: ..." (`expression.py`). A text without an expression is
the answer and ends the episode. The reward is 1 if the text's last number is the product, else 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ftis_node.records.think_block import after_thinking
from ftis_node.tasks.base import TaskItem, asked
from ftis_node.tasks.episodes.expression import EXPRESSION, ExpressionError, value_of
from ftis_node.tasks.problems import HELD_OUT_ONE_IN, DrawnTask, Prompt, stable_hash
from ftis_node.tasks.words import last_number

OPERANDS: Final = range(11, 100)
SYSTEM_PROMPT: Final = (
    "You have a calculator. Write an expression, such as 12 * 34, and you get its value. "
    "Then answer in one short sentence."
)
MAX_CHARS_READ: Final = 2000  # of a text


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
