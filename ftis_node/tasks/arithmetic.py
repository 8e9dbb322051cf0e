"""Task `arithmetic`: one sum or difference, in which both numbers and the answer have two digits.

A swarm learns it on two CPU cores in minutes: prompts of six characters, answers of two, and no data file. Every digit
has a fixed place, because then a model of two layers learns such sums in seconds. With answers of one to three digits
it often does not. A real example, index 0 of the training split:

    prompt   [{"role": "user", "content": "25-15="}]
    answer   "10"
    reward   1.0 for "10" (white space around it is ignored), 0.0 for anything else

`PARTS` divides the problems by kind and by difficulty, so that experiments can start from models with different
expertise. The `NUM_HELD_OUT` problems of each kind with the smallest hash are held out; `a+b` and `b+a` count as one.
Training on a part never shows an answer of its test split, but training on another part may. docs/train/tasks.md
defines all problems.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Final, Literal, NamedTuple

from ftis_node.records.think_block import after_thinking
from ftis_node.tasks.base import TaskItem
from ftis_node.tasks.problems import NUM_TRAIN, GeneratedTask, Prompt, stable_hash

TWO_DIGITS: Final = range(10, 100)  # both operands and the answer
NUM_HELD_OUT: Final = 256  # problems of each kind that training never shows
NUM_TEST: Final = 500  # for each part with a separate test split; a sum counts in both orders

Kind = Literal["add", "sub"]


class ArithmeticProblem(NamedTuple):
    """`left` plus or minus `right`."""

    kind: Kind
    left: int
    right: int

    @property
    def text(self) -> str:
        """Return the problem as in the prompt, such as `17+25=`."""
        return f"{self.left}{'+' if self.kind == 'add' else '-'}{self.right}="

    @property
    def answer(self) -> int:
        return self.left + self.right if self.kind == "add" else self.left - self.right

    @property
    def is_in_task(self) -> bool:
        """Return whether the task contains the problem: its answer has two digits, as the operands have."""
        return self.answer in TWO_DIGITS

    @property
    def is_crossing(self) -> bool:
        """Return whether the sum carries or the difference borrows."""
        left, right = self.left % 10, self.right % 10
        return left + right > 9 if self.kind == "add" else left < right

    @property
    def canonical(self) -> ArithmeticProblem:
        """Return the problem with its larger operand first; equal canonical forms are held out together."""
        return ArithmeticProblem(self.kind, max(self.left, self.right), min(self.left, self.right))


class ProblemPart(NamedTuple):
    """Problems of a spec: their kinds, and whether they carry or borrow (True), do not (False), or both (None).

    With `has_own_test`, the part holds out `NUM_TEST` problems besides those that all parts hold out.
    """

    kinds: tuple[Kind, ...]
    crossing: bool | None = None
    has_own_test: bool = False

    def asks(self, problem: ArithmeticProblem) -> bool:
        fits = problem.kind in self.kinds and self.crossing in (None, problem.is_crossing)
        return fits and problem.is_in_task


PARTS: Final = {
    "": ProblemPart(("add", "sub")),
    "add": ProblemPart(("add",)),
    "sub": ProblemPart(("sub",)),
    "easy": ProblemPart(("add",), crossing=False),
    "medium": ProblemPart(("add",), crossing=True),
    "hard": ProblemPart(("sub",), crossing=True),
    "no-carry": ProblemPart(("add",), crossing=False, has_own_test=True),
    "carry": ProblemPart(("add",), crossing=True, has_own_test=True),
    "borrow": ProblemPart(("sub",), crossing=True, has_own_test=True),
}


class ArithmeticTask(GeneratedTask):
    """A split of `arithmetic` or of one of its parts, such as `arithmetic:add`, as a `Task`."""

    family = "arithmetic"
    parts = PARTS

    def __init__(self, split: str = "train", part: str = "") -> None:
        super().__init__(split, part)
        self._part = PARTS[part]

    def __len__(self) -> int:
        return NUM_TRAIN if self.split == "train" else len(_held_out_of(self._part))

    def prompt_and_answer(self, index: int) -> tuple[Prompt, str]:
        problem = self.problem(index)
        return ({"role": "user", "content": problem.text},), str(problem.answer)

    def problem(self, index: int) -> ArithmeticProblem:
        """Return the operands of `self[index]`, for the training of models with systematic mistakes."""
        return _training_problem(self._part, index) if self.split == "train" else _held_out_of(self._part)[index]

    def score(self, item: TaskItem, completion_text: str) -> float:
        return 1.0 if self.answer_of(item, completion_text) == item.answer else 0.0

    def answer_of(self, item: TaskItem, completion_text: str) -> str | None:
        """Return the text after a think block, as `score` reads it."""
        return after_thinking(completion_text).strip() or None


def _training_problem(part: ProblemPart, index: int) -> ArithmeticProblem:
    """Return the first draw for `index` that the part contains and training may show.

    The kind is drawn first, so that all kinds are equally frequent.
    """
    kind = part.kinds[stable_hash(f"train/{index}") % len(part.kinds)]
    draws = (_draw(kind, f"train/{index}/{attempt}") for attempt in count())
    return next(draw for draw in draws if part.asks(draw) and draw.canonical not in held_out_set(part))


@cache
def _held_out_of(part: ProblemPart) -> tuple[ArithmeticProblem, ...]:
    """Return the part's test split: kinds alternate, and about half of the sums have the larger operand first."""
    if part.has_own_test:
        return _own_test(part)
    by_kind = [[problem for problem in _held_out(kind) if part.asks(problem)] for kind in part.kinds]
    return tuple(_turned(problem) for turn in zip(*by_kind, strict=True) for problem in turn)


def _turned(problem: ArithmeticProblem) -> ArithmeticProblem:
    """Return the problem; by its hash, a sum may have its operands exchanged."""
    swap = problem.kind == "add" and stable_hash(problem.text) % 2
    return ArithmeticProblem(problem.kind, problem.right, problem.left) if swap else problem


def _draw(kind: Kind, seed: str) -> ArithmeticProblem:
    """Draw both operands uniformly; the larger one comes first in a difference."""
    bits, left = divmod(stable_hash(seed), len(TWO_DIGITS))
    problem = ArithmeticProblem(kind, TWO_DIGITS[left], TWO_DIGITS[bits % len(TWO_DIGITS)])
    return problem if kind == "add" else problem.canonical


@cache
def _own_test(part: ProblemPart) -> tuple[ArithmeticProblem, ...]:
    """Return the test split of a part of one kind: its problems, smallest hash first, a sum in both orders."""
    (kind,) = part.kinds
    problems = (problem for problem in _by_hash(kind) if part.asks(problem))
    orders = (
        (problem, ArithmeticProblem(kind, problem.right, problem.left)) if kind == "add" else (problem,)
        for problem in problems
    )
    return tuple(dict.fromkeys(problem for both in orders for problem in both))[:NUM_TEST]


def _held_out(kind: Kind) -> tuple[ArithmeticProblem, ...]:
    return _by_hash(kind)[:NUM_HELD_OUT]


@cache
def _by_hash(kind: Kind) -> tuple[ArithmeticProblem, ...]:
    """Return all problems of one kind in canonical form, smallest hash first."""
    pairs = (ArithmeticProblem(kind, left, right) for left in TWO_DIGITS for right in TWO_DIGITS if right <= left)
    return tuple(
        sorted((problem for problem in pairs if problem.is_in_task), key=lambda problem: stable_hash(problem.text))
    )


@cache
def held_out_set(part: ProblemPart) -> frozenset[ArithmeticProblem]:
    """Return the problems, in canonical form, that training on this part never shows."""
    own = {problem.canonical for problem in _own_test(part)} if part.has_own_test else set()
    return frozenset({*_held_out("add"), *_held_out("sub"), *own})
