"""Episode `countdown`: reach a target with given numbers, with feedback, for language models.

    prompt        system: the rules; user: "Numbers: 68, 19, 32, 13. Target: 94."
    text          "68 + 32"                observation   "= 100, 6 too high; 19 is used 0 times, not 1; ..."
    text          "68 + 32 + 13 + 19"      observation   "= 132, 38 too high"
    text          "13 + 68 + 32 - 19"      the end: every number once, and the target

This is the task of arXiv 2404.03683: three or four numbers below 100, targets from 10 to 99, every number once.
`countdown:small` has two or three numbers up to 12 and no division, for models from about 100 M.

A text's last expression counts (`expression.py`). The reward is 1 if that of the last text is right, `FORM_REWARD` if
it has every number once but another value, else 0.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from ftis_node.records.think_block import after_thinking
from ftis_node.tasks.base import TaskItem, asked
from ftis_node.tasks.episodes.expression import EXPRESSION, ExpressionError, decimal, exact_value
from ftis_node.tasks.problems import HELD_OUT_ONE_IN, DrawnTask, Prompt, stable_hash

FORM_REWARD: Final = 0.1
MAX_CHARS_READ: Final = 2000  # the end of a text
SYSTEM_PROMPT: Final = (
    "Write an expression whose value is the target. Use every number once, with {signs} and brackets, "
    "such as (1 + 2) * 3. If it is wrong, you get its value and can try again."
)
T = TypeVar("T")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")


class Variant(NamedTuple):
    """Bounds of the problems. `signs` are those of solutions, the frequent ones twice."""

    counts: range
    numbers: range
    targets: range
    signs: str


VARIANTS: Final = {
    "": Variant(range(3, 5), range(1, 100), range(10, 100), "+-*/+-"),
    "small": Variant(range(2, 4), range(1, 13), range(1, 100), "+-*+-"),
}


@dataclass(frozen=True, slots=True)
class CountdownProblem:
    """Numbers, the target that they reach if each is used once, and an expression that does so."""

    numbers: tuple[int, ...]
    target: int
    solution: str = field(compare=False)

    @property
    def is_held_out(self) -> bool:
        """Return whether the problem is held out, with its numbers in any order."""
        return stable_hash(f"{sorted(self.numbers)}={self.target}") % HELD_OUT_ONE_IN == 0


class CountdownEpisode(DrawnTask[CountdownProblem]):
    """A split of `countdown` or `countdown:small`, as an `Episode`. Its state is the item."""

    family = "countdown"
    parts = VARIANTS
    num_test = 256

    def draw(self, seed: str) -> CountdownProblem | None:
        return _draw(seed, VARIANTS[self.part])

    def prompt_and_answer(self, index: int) -> tuple[Prompt, str]:
        problem = self.problem(index)
        rules = SYSTEM_PROMPT.format(signs=" ".join(dict.fromkeys(VARIANTS[self.part].signs)))
        numbers = ", ".join(map(str, problem.numbers))
        return asked(f"Numbers: {numbers}. Target: {problem.target}.", rules), problem.solution

    def begin(self, item: TaskItem) -> CountdownProblem:
        return self.problem(item.ref.index)

    def step(self, state: CountdownProblem, text: str) -> tuple[str | None, CountdownProblem]:
        return _feedback(state, _expression_in(text)), state

    def answer_of(self, item: TaskItem, text: str) -> str | None:
        """Return the last expression of a text without spaces, for votes."""
        return _expression_in(text).replace(" ", "") or None

    def score(self, item: TaskItem, texts: Sequence[str]) -> float:
        problem, expression = self.problem(item.ref.index), _expression_in(texts[-1])
        if _feedback(problem, expression) is None:
            return 1.0
        return 0.0 if _faults(problem, expression) else FORM_REWARD


def _expression_in(text: str) -> str:
    """Return the last expression of a text; "" if there is none."""
    found: list[str] = EXPRESSION.findall(after_thinking(text)[-MAX_CHARS_READ:])
    return found[-1] if found else ""


def _feedback(problem: CountdownProblem, expression: str) -> str | None:
    """Return the value of an expression and what is wrong with it; None for a solution."""
    if not expression:
        return "no expression"
    try:
        value = exact_value(expression)
    except ExpressionError as error:
        return f"error: {error}"
    off, faults = value - problem.target, _faults(problem, expression)
    if not off and not faults:
        return None
    direction = f", {decimal(abs(off))} too {'high' if off > 0 else 'low'}" if off else ""
    return "; ".join([f"= {decimal(value)}{direction}", *faults])


def _faults(problem: CountdownProblem, expression: str) -> list[str]:
    """Return what is wrong with the numbers of an expression, in their order."""
    used, given = Counter(_NUMBER.findall(expression)), Counter(map(str, problem.numbers))
    not_given = [f"{number} is not given" for number in used if number not in given]
    return not_given + [
        f"{number} is used {used[number]} times, not {times}"
        for number, times in given.items()
        if used[number] != times
    ]


def _draw(seed: str, variant: Variant) -> CountdownProblem | None:
    """Draw numbers, and combine them in a random order to a target; None if it is out of bounds."""
    rest = stable_hash(seed)

    def drawn(values: Sequence[T]) -> T:
        nonlocal rest
        rest, place = divmod(rest, len(values))
        return values[place]

    numbers = tuple(drawn(variant.numbers) for _ in range(drawn(variant.counts)))
    left = [(number, str(number)) for number in numbers]
    while len(left) > 1:
        (one, first), (other, second) = (left.pop(drawn(range(len(left)))) for _ in range(2))
        sign = drawn(variant.signs)
        if (sign == "/" and one % other) or (sign == "-" and one <= other):
            return None
        value = {"+": one + other, "-": one - other, "*": one * other, "/": one // other}[sign]
        left.append((value, f"({first} {sign} {second})"))
    ((target, solution),) = left
    return CountdownProblem(numbers, target, solution[1:-1]) if target in variant.targets else None
