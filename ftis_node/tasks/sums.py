"""Task `sums`: the sum of two numbers of three digits, with the working before the answer.

Models learn its completions of 25 to 60 tokens on two CPU cores in minutes. A model that writes down each column needs
only sums of two digits and a carry. The working may have any form; the answer follows the last `#`. Index 0 of the
training split:

    prompt   [{"role": "user", "content": "555+173="}]
    answer   "728"
    reward   1.0 for any text that ends in "#728" (white space around the answer is ignored), else 0.0

`sums:long` has numbers of four digits, to test generalization from three. docs/train/tasks.md defines all problems.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ftis_node.tasks.base import TaskItem
from ftis_node.tasks.problems import HELD_OUT_ONE_IN, DrawnTask, Prompt, stable_hash

ANSWER_MARK: Final = "#"


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


class SumsTask(DrawnTask[SumProblem]):
    """A split of `sums` or of `sums:long`, as a `Task`."""

    family = "sums"
    parts = ("", "long")
    num_test = 1024
    seed_prefix = ""

    def draw(self, seed: str) -> SumProblem:
        num_digits = 4 if self.part else 3
        smallest = 10 ** (num_digits - 1)
        bits, left = divmod(stable_hash(seed), 9 * smallest)
        return SumProblem(smallest + left, smallest + bits % (9 * smallest), num_digits)

    def prompt_and_answer(self, index: int) -> tuple[Prompt, str]:
        problem = self.problem(index)
        return ({"role": "user", "content": problem.text},), str(problem.answer)

    def score(self, item: TaskItem, completion_text: str) -> float:
        return 1.0 if self.answer_of(item, completion_text) == item.answer else 0.0

    def answer_of(self, item: TaskItem, completion_text: str) -> str | None:
        """Return the text after the last `#`; None if there is no `#` or no text after it."""
        _, mark, answer = completion_text.rpartition(ANSWER_MARK)
        return answer.strip() or None if mark else None
