"""Episode `programs`: questions that need a small program, for language models.

    prompt        system: how to run a program; user: "What is the sum of the squares of all multiples of 7 below 500?"
    text          "```python\\nprint(sum(n * n for n in range(0, 500, 7)))\\n```"     observation   "5969964"
    text          "The sum is 5969964."

A text with a block between ``` lines is a call. Its observation is what the first block prints (`program.py`). A text
without a block is the answer and ends the episode. The reward is 1 if the text's last number is right, else 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ftis_node.records.think_block import after_thinking
from ftis_node.tasks.base import TaskItem, asked
from ftis_node.tasks.episodes.program import output_of
from ftis_node.tasks.problems import DrawnTask, Prompt
from ftis_node.tasks.words import Form, WordProblem, draw_problem, last_number

MAX_CHARS_READ: Final = 4000  # of a text
FENCE: Final = "```"
LANGUAGES: Final = ("", "python", "py")
SYSTEM_PROMPT: Final = (
    "You can run a small Python program without imports and functions of your own. Write it between ``` and ```, "
    "print the result, and you get what it prints. Then answer in one short sentence."
)
LIMITS, POWERS, PLACES, DIVISORS, SMALL = range(100, 1000), range(20, 200), range(5, 50), range(3, 20), range(2, 10)


def _digit_sum(number: int) -> int:
    return sum(map(int, str(number)))


def _sequence(factor: int, place: int) -> int:
    one, other = 1, 1
    for _ in range(place - 1):
        one, other = other, other + factor * one
    return one


FORMS: Final = (
    Form(
        "What is the sum of the squares of all multiples of {a} below {b}?",
        (DIVISORS, LIMITS),
        lambda a, b: sum(n * n for n in range(0, b, a)),
    ),
    Form(
        "How many whole numbers from 1 to {c} can be divided by {a} but not by {b}?",
        (SMALL, DIVISORS, LIMITS),
        lambda a, b, c: sum(n % a == 0 and n % b != 0 for n in range(1, c + 1)),
    ),
    Form(
        "What is the sum of all whole numbers below {b} whose digits have the sum {a}?",
        (DIVISORS, LIMITS),
        lambda a, b: sum(n for n in range(b) if _digit_sum(n) == a),
    ),
    Form(
        "What is the remainder of {a} to the power of {b}, divided by {c}?",
        (DIVISORS, POWERS, LIMITS),
        lambda a, b, c: a**b % c,
    ),
    Form(
        "A sequence begins with 1 and 1. Each later number is the one before it plus {a} times the one before that. "
        "What is number {b} of the sequence?",
        (SMALL, PLACES),
        _sequence,
    ),
)


class ProgramsEpisode(DrawnTask[WordProblem]):
    """A split of `programs`, as an `Episode` without a state."""

    family = "programs"
    num_test = 256
    isolate_scoring = True

    def draw(self, seed: str) -> WordProblem:
        return draw_problem(FORMS, seed)._replace(draw=0)  # no form has names

    def prompt_and_answer(self, index: int) -> tuple[Prompt, str]:
        problem = self.problem(index)
        return asked(problem.text, SYSTEM_PROMPT), str(problem.answer)

    def begin(self, item: TaskItem) -> None:
        return None

    def step(self, state: None, text: str) -> tuple[str | None, None]:
        program = _program_in(after_thinking(text))
        return None if program is None else output_of(program), None

    def answer_of(self, item: TaskItem, text: str) -> str | None:
        return last_number(after_thinking(text))

    def score(self, item: TaskItem, texts: Sequence[str]) -> float:
        answer = after_thinking(texts[-1])
        return 1.0 if _program_in(answer) is None and last_number(answer) == item.answer else 0.0


def _program_in(text: str) -> str | None:
    """Return the first program in a text, closed or not; None if there is none."""
    _, fence, rest = text[:MAX_CHARS_READ].partition(FENCE)
    program = rest.partition(FENCE)[0]
    first, _, others = program.partition("\n")
    if not fence:
        return None
    return others if first.strip().lower() in LANGUAGES else program
