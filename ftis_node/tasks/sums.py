"""Task `sums`: the sum of two numbers of three digits, with the working before the answer.

Models learn its completions of 25 to 60 tokens on two CPU cores in minutes. A model that writes down each column needs
only sums of two digits and a carry. The working may have any form; the answer follows the last `#`. A real example,
index 0 of the training split:

    prompt   [{"role": "user", "content": "555+173="}]
    answer   "728"
    reward   1.0 for any text that ends in "#728" (white space around the answer is ignored), else 0.0

`sums:long` has numbers of four digits, to test generalization from three.

An index is a seed: `train[i]` hashes i to a problem. Whole problems are held out, not indices: those whose hash is 0
modulo `HELD_OUT_ONE_IN`. `a+b` and `b+a` count as one problem. If a training draw is held out, another one is drawn.
The test split has the first `NUM_TEST` held-out draws. Hashes are blake2b: every machine makes the same prompts.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar, Final, NamedTuple

from ftis_node.errors import TaskError
from ftis_node.tasks.base import TaskItem
from ftis_node.tasks.problems import (
    HELD_OUT_ONE_IN,
    NUM_TRAIN,
    IndexedTask,
    Prompt,
    held_out_draws,
    stable_hash,
    training_draw,
)

NUM_TEST: Final = 1024
ANSWER_MARK: Final = "#"
DIGITS: Final = {"sums": 3, "sums:long": 4}


class SumProblem(NamedTuple):
    """`left` plus `right`, both of `num_digits` digits."""

    left: int
    right: int
    num_digits: int

    @property
    def text(self) -> str:
        """Return the problem as in the prompt, such as `347+285=`."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> int:
        return self.left + self.right

    @property
    def is_held_out(self) -> bool:
        """Return whether the problem, or the same with exchanged operands, is held out."""
        return stable_hash(f"{max(self.left, self.right)}+{min(self.left, self.right)}") % HELD_OUT_ONE_IN == 0


class SumsTask(IndexedTask):
    """A split of `sums` or of `sums:long`, as a `Task`. Raises TaskError for an unknown split or task."""

    isolate_scoring: ClassVar[bool] = False

    def __init__(self, split: str = "train", *, name: str = "sums") -> None:
        if split not in ("train", "test"):
            raise TaskError(f"{name} has no split {split!r}: use train or test")
        if name not in DIGITS:
            raise TaskError(f"unknown task {name!r}: use {' or '.join(DIGITS)}")
        self.name = name
        self.split = split
        self._num_digits = DIGITS[name]

    def __len__(self) -> int:
        return NUM_TRAIN if self.split == "train" else NUM_TEST

    def prompt_and_answer(self, index: int) -> tuple[Prompt, str]:
        problem = self.problem(index)
        return ({"role": "user", "content": problem.text},), str(problem.answer)

    def problem(self, index: int) -> SumProblem:
        if self.split == "test":
            return _test_split(self._num_digits)[index]
        return training_draw(lambda seed: _draw(seed, self._num_digits), f"train/{index}")

    def score(self, item: TaskItem, completion_text: str) -> float:
        return 1.0 if self.answer_of(item, completion_text) == item.answer else 0.0

    def answer_of(self, item: TaskItem, completion_text: str) -> str | None:
        """Return the text after the last `#`; None if there is no `#` or no text after it."""
        _, mark, answer = completion_text.rpartition(ANSWER_MARK)
        return answer.strip() or None if mark else None


@cache
def _test_split(num_digits: int) -> tuple[SumProblem, ...]:
    return held_out_draws(lambda seed: _draw(seed, num_digits), "test", NUM_TEST)


def _draw(seed: str, num_digits: int) -> SumProblem:
    smallest = 10 ** (num_digits - 1)
    bits, left = divmod(stable_hash(seed), 9 * smallest)
    return SumProblem(smallest + left, smallest + bits % (9 * smallest), num_digits)
