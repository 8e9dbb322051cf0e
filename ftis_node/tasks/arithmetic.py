"""The task `arithmetic`: one sum or difference of two numbers of two digits.

It exists so that a swarm can be seen to learn on two CPU cores in minutes: prompts of six characters, answers of at
most three digits, and no data file. A real example, index 0 of the training split:

    prompt   [{"role": "user", "content": "61-55="}]
    answer   "6"
    reward   1.0 for "6" (white space around it is ignored), 0.0 for anything else

Three specs share the problems: `arithmetic` asks both kinds, `arithmetic:add` and `arithmetic:sub` one of them, so
that experiments can start from models with different expertise.

An index is a seed: `train[i]` hashes i to a problem, so the training split is as long as one likes and repeats
problems. Held out are whole problems, not indices: the `NUM_HELD_OUT` of each kind with the smallest hash, where `a+b`
and `b+a` count as one. A training draw that falls on one of them is drawn again, so no test answer can be learnt by
heart. Hashes are blake2b: every machine must make the same prompts.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from itertools import count
from typing import ClassVar, Final, Literal, NamedTuple

from ftis_node.errors import TaskError
from ftis_node.records.group import PromptRef
from ftis_node.tasks.base import TaskItem

SMALLEST: Final = 10
NUM_OPERANDS: Final = 90  # operands are 10 to 99
OPERANDS: Final = range(SMALLEST, SMALLEST + NUM_OPERANDS)
NUM_TRAIN: Final = 2**31
NUM_HELD_OUT: Final = 512  # problems of each kind that training never shows; also the length of every test split

Kind = Literal["add", "sub"]
PARTS: Final[dict[str, tuple[Kind, ...]]] = {"both": ("add", "sub"), "add": ("add",), "sub": ("sub",)}


class Problem(NamedTuple):
    """`left` plus or minus `right`; a difference is never negative."""

    kind: Kind
    left: int
    right: int

    @property
    def text(self) -> str:
        """The problem as the prompt shows it, such as `17+25=`."""
        return f"{self.left}{'+' if self.kind == 'add' else '-'}{self.right}="

    @property
    def answer(self) -> int:
        """The right answer, 0 to 198."""
        return self.left + self.right if self.kind == "add" else self.left - self.right

    @property
    def canonical(self) -> Problem:
        """What is held out as one: the problem with its larger operand first."""
        return Problem(self.kind, max(self.left, self.right), min(self.left, self.right))


class ArithmeticTask:
    """A split of `arithmetic` (`parts="both"`), `arithmetic:add` or `arithmetic:sub`, as a `Task`.

    Raises TaskError where there is no such split or part.
    """

    isolate_scoring: ClassVar[bool] = False

    def __init__(self, split: str = "train", *, parts: str = "both") -> None:
        if split not in ("train", "test"):
            raise TaskError(f"arithmetic has no split {split!r}: use train or test")
        if parts not in PARTS:
            raise TaskError(f"there is no task 'arithmetic:{parts}': use arithmetic, arithmetic:add or arithmetic:sub")
        self.name = "arithmetic" if parts == "both" else f"arithmetic:{parts}"
        self.split = split
        self._kinds = PARTS[parts]

    def __len__(self) -> int:
        return NUM_TRAIN if self.split == "train" else NUM_HELD_OUT

    def __getitem__(self, index: int) -> TaskItem:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}/{self.split} has no problem {index}")
        problem = self.problem(index)
        return TaskItem(
            ref=PromptRef(task=self.name, split=self.split, index=index),
            prompt=({"role": "user", "content": problem.text},),
            answer=str(problem.answer),
        )

    def problem(self, index: int) -> Problem:
        """The operands behind `self[index]`, for those who build models that get them wrong."""
        return _training_problem(self._kinds, index) if self.split == "train" else _held_out_problem(self._kinds, index)

    def resolve(self, ref: PromptRef) -> TaskItem:
        if (ref.task, ref.split) != (self.name, self.split) or not 0 <= ref.index < len(self):
            raise KeyError(str(ref))
        return self[ref.index]

    def score(self, item: TaskItem, completion_text: str) -> float:
        return 1.0 if completion_text.strip() == item.answer else 0.0


def _training_problem(kinds: tuple[Kind, ...], index: int) -> Problem:
    """The first draw for `index` that is not held out."""
    draws = (_draw(kinds, f"train/{index}/{attempt}") for attempt in count())
    return next(problem for problem in draws if problem.canonical not in _held_out_set())


def _held_out_problem(kinds: tuple[Kind, ...], index: int) -> Problem:
    """The kinds take turns; a sum keeps the larger operand first in about half of the cases."""
    turn, kind = divmod(index, len(kinds))
    problem = _held_out(kinds[kind])[turn]
    swap = problem.kind == "add" and _hash(problem.text) % 2
    return Problem(problem.kind, problem.right, problem.left) if swap else problem


def _draw(kinds: tuple[Kind, ...], seed: str) -> Problem:
    """A problem with both operands uniform, made a difference's larger-first where the kind asks for it."""
    bits, left = divmod(_hash(seed), NUM_OPERANDS)
    bits, right = divmod(bits, NUM_OPERANDS)
    problem = Problem(kinds[bits % len(kinds)], SMALLEST + left, SMALLEST + right)
    return problem if problem.kind == "add" else problem.canonical


@cache
def _held_out(kind: Kind) -> tuple[Problem, ...]:
    """The held-out problems of one kind in canonical form, smallest hash first."""
    everything = (Problem(kind, left, right) for left in OPERANDS for right in range(SMALLEST, left + 1))
    return tuple(sorted(everything, key=lambda problem: _hash(problem.text))[:NUM_HELD_OUT])


@cache
def _held_out_set() -> frozenset[Problem]:
    """All held-out problems, for a quick look."""
    return frozenset(_held_out("add") + _held_out("sub"))


def _hash(text: str) -> int:
    """64 bits that are the same on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
