"""Task `words`: sums and word problems in plain English, for pretrained models from about 100 M to 3 B parameters.

A small language model solves some of them and learns more within an hour on two CPU cores. The answer is the last
number of a completion, so any working is allowed. A real example, index 0 of the training split:

    prompt   [{"role": "system", "content": "Answer in one short sentence."},
              {"role": "user", "content": "What is 9 times 8?"}]
    answer   "72"
    reward   1.0 for any text whose last number is 72 (`72`, `9 x 8 = 72.`, `72 coins`), else 0.0

`words:1` to `words:4` are the forms of one level: sums, one step with small numbers, one step with larger numbers, two
steps. `words:unseen` has only a test split, of other forms, which measures generalization.

Problems whose form and numbers have a hash of 0 modulo `HELD_OUT_ONE_IN` are held out. Names and the order of the first
two numbers do not count. The forms of `words:1` have few numbers, so a third is held out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from operator import add, mul, sub
from typing import Final, NamedTuple

from ftis_node.errors import TaskError
from ftis_node.tasks.base import TaskItem, asked
from ftis_node.tasks.problems import DrawnTask, Prompt, stable_hash

HELD_OUT_ONE_IN: Final = 3
NAMES: Final = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Julia", "Kofi", "Lena", "Omar")
OTHER_NAMES: Final = ("Maya", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tara", "Victor")
THINGS: Final = ("apples", "books", "cards", "coins", "cookies", "eggs", "marbles", "pencils", "shells", "stickers")
DIGITS, SMALL, LARGE = range(2, 10), range(5, 21), range(11, 61)
SYSTEM_PROMPT: Final = "Answer in one short sentence."  # without it a small chat model explains for 60 tokens
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")


class Form(NamedTuple):
    """A text with places for numbers and names, the values of each number, and the answer to them."""

    text: str
    numbers: tuple[range, ...]
    answer: Callable[..., int]

    @property
    def falls(self) -> bool:
        """Return whether the larger one of the first two numbers comes first."""
        return self.answer is sub


FORMS: Final = {
    "1": (
        Form("What is {a} + {b}?", (SMALL, SMALL), add),
        Form("What is {a} minus {b}?", (SMALL, SMALL), sub),
        Form("What is {a} times {b}?", (DIGITS, DIGITS), mul),
    ),
    "2": (
        Form("{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?", (SMALL, SMALL), add),
        Form("{name} had {a} {things} and gave away {b} of them. How many {things} are left?", (SMALL, SMALL), sub),
        Form(
            "There are {a} {things} in one box and {b} {things} in another. How many {things} are there in all?",
            (SMALL, SMALL),
            add,
        ),
    ),
    "3": (
        Form("One bag holds {a} {things}. How many {things} do {b} bags hold?", (SMALL, DIGITS), mul),
        Form(
            "{name} read {a} pages on Monday and {b} pages on Tuesday. How many pages did {name} read in all?",
            (LARGE, LARGE),
            add,
        ),
        Form(
            "A lamp costs {a} dollars. A chair costs {b} dollars less. How many dollars does the chair cost?",
            (LARGE, LARGE),
            sub,
        ),
    ),
    "4": (
        Form(
            "{name} has {a} bags with {b} {things} in each, and {c} more {things}. How many {things} are there in all?",
            (DIGITS, DIGITS, DIGITS),
            lambda a, b, c: a * b + c,
        ),
        Form(
            "{name} had {a} {things}, bought {b} more and gave {c} to {other}. How many {things} does {name} have now?",
            (SMALL, SMALL, DIGITS),
            lambda a, b, c: a + b - c,
        ),
        Form(
            "{name} has {a} {things}. {other} has {b} times as many. How many {things} do they have together?",
            (SMALL, range(2, 5)),
            lambda a, b: a + a * b,
        ),
    ),
    "unseen": (
        Form(
            "{name} gave {a} {things} to {other} and has {b} left. How many {things} did {name} have at first?",
            (SMALL, SMALL),
            add,
        ),
        Form(
            "{name} has {a} {things}. {other} has {b}. How many more {things} does {name} have than {other}?",
            (SMALL, SMALL),
            sub,
        ),
        Form(
            "Start with {a}, add {b}, then take away {c}. What is the result?",
            (SMALL, SMALL, DIGITS),
            lambda a, b, c: a + b - c,
        ),
        Form(
            "A garden has {a} rows of {b} trees. Then {c} trees are cut down. How many trees are left?",
            (DIGITS, DIGITS, range(2, 5)),
            lambda a, b, c: a * b - c,
        ),
    ),
}


class WordProblem(NamedTuple):
    """A form with its numbers, and the draw that chooses names."""

    form: Form
    numbers: tuple[int, ...]
    draw: int

    @property
    def text(self) -> str:
        rest, places = self.draw, dict(zip("abc", self.numbers, strict=False))
        rest, name = divmod(rest, len(NAMES))
        rest, other = divmod(rest, len(OTHER_NAMES))
        things = THINGS[rest % len(THINGS)]
        return self.form.text.format(name=NAMES[name], other=OTHER_NAMES[other], things=things, **places)

    @property
    def answer(self) -> int:
        return self.form.answer(*self.numbers)

    @property
    def key(self) -> str:
        """Return what problems have in common that differ in names, or in the order of the first two numbers."""
        first, second, *rest = self.numbers
        numbers = (max(first, second), min(first, second), *rest)
        return "/".join([self.form.text, *map(str, numbers)])

    @property
    def is_held_out(self) -> bool:
        return stable_hash(self.key) % HELD_OUT_ONE_IN == 0


class WordsTask(DrawnTask[WordProblem]):
    """A split of `words` or of one of its parts, as a `Task`. Raises TaskError for an unknown part or split."""

    family = "words"
    parts = ("", *FORMS)
    num_test = 512  # at most
    seed_prefix = ""

    def __init__(self, split: str = "train", part: str = "") -> None:
        super().__init__(split, part)
        if part == "unseen" and split != "test":
            raise TaskError(f"words has no split {split!r}: use test")
        self._forms = FORMS[part] if part else tuple(form for level in "1234" for form in FORMS[level])

    def draw(self, seed: str) -> WordProblem:
        """Draw the form, each number and the names independently of each other, all uniformly."""
        rest, which = divmod(stable_hash(seed), len(self._forms))
        form = self._forms[which]
        numbers = []
        for values in form.numbers:
            rest, place = divmod(rest, len(values))
            numbers.append(values[place])
        if form.falls:
            numbers.sort(reverse=True)
        return WordProblem(form, tuple(numbers), rest)

    def test_problems(self) -> tuple[WordProblem, ...]:
        """Make the test split: the first draws with different keys that are held out, as all of `unseen` are."""
        every = (WordProblem(form, numbers, 0) for form in self._forms for numbers in product(*form.numbers))
        keys = {problem.key for problem in every if self.part == "unseen" or problem.is_held_out}
        found: dict[str, WordProblem] = {}
        for draw in self.draws("test"):
            if draw.key in keys:
                found.setdefault(draw.key, draw)
            if len(found) == min(self.num_test, len(keys)):
                break
        return tuple(found.values())

    def prompt_and_answer(self, index: int) -> tuple[Prompt, str]:
        problem = self.problem(index)
        return asked(problem.text, SYSTEM_PROMPT), str(problem.answer)

    def score(self, item: TaskItem, completion_text: str) -> float:
        return 1.0 if self.answer_of(item, completion_text) == item.answer else 0.0

    def answer_of(self, item: TaskItem, completion_text: str) -> str | None:
        return last_number(completion_text)


def last_number(text: str) -> str | None:
    """Return the last number of a text without commas and a fraction of zero; None if there is no number."""
    numbers = _NUMBER.findall(text)
    return re.sub(r"\.0+$", "", numbers[-1].replace(",", "")) if numbers else None
