"""Problems by index: bases of the tasks that have them.

The index of a drawn problem is a seed: `train[i]` hashes i to a problem, on every machine to the same one (blake2b).
Whole problems are held out, not indices. If a training draw is held out, another one is drawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import count
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

from ftis_node.errors import TaskError
from ftis_node.records.group import PromptRef
from ftis_node.tasks.base import ChatMessage, TaskItem

Prompt = tuple[ChatMessage, ...]
NUM_TRAIN: Final = 2**31
HELD_OUT_ONE_IN: Final = 16


class IndexedTask(ABC):
    """Base of a task whose problems are named by their index in a split. A subclass sets `name` and `split`."""

    name: str
    split: str

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def prompt_and_answer(self, index: int) -> tuple[Prompt, str]:
        """Return the chat messages and the reference answer of problem `index`, 0 <= index < len(self)."""

    def __getitem__(self, index: int) -> TaskItem:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}/{self.split} has no problem {index}")
        return TaskItem(PromptRef(self.name, self.split, index), *self.prompt_and_answer(index))

    def resolve(self, ref: PromptRef) -> TaskItem:
        if (ref.task, ref.split) != (self.name, self.split) or not 0 <= ref.index < len(self):
            raise KeyError(str(ref))
        return self[ref.index]


@dataclass(frozen=True, slots=True)
class Problem:
    question: str
    answer: str


def stable_hash(text: str) -> int:
    """Return 64 bits that are equal on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class GeneratedTask(IndexedTask):
    """A split of a task of this package, or of one of its `parts` (`sums:long`). The part "" is the whole task."""

    family: ClassVar[str]
    parts: ClassVar[Collection[str]] = ("",)
    isolate_scoring: ClassVar[bool] = False

    def __init__(self, split: str = "train", part: str = "") -> None:
        """Raises TaskError for an unknown part."""
        names = {each: f"{self.family}:{each}" if each else self.family for each in self.parts}
        if part not in names:
            raise TaskError(f"unknown task '{self.family}:{part}': use {', '.join(names.values())}")
        self.name = names[part]
        self.split = split
        self.part = part


class _Drawn(Protocol):
    @property
    def is_held_out(self) -> bool: ...


Drawn = TypeVar("Drawn", bound=_Drawn)


class DrawnTask(GeneratedTask, Generic[Drawn]):
    """Base of a task whose problems are drawn from texts."""

    num_test: ClassVar[int]

    @abstractmethod
    def draw(self, seed: str) -> Drawn:
        """Return the problem of a text."""

    @property
    def seed_prefix(self) -> str:
        """The text with which the seeds of all draws begin."""
        return f"{self.name}/"

    def draws(self, seed: str) -> Iterator[Drawn]:
        """Yield the problems of the seeds `SEED/0`, `SEED/1`, ..."""
        return (self.draw(f"{self.seed_prefix}{seed}/{attempt}") for attempt in count())

    def problem(self, index: int) -> Drawn:
        """Return the problem of an index: in training the first draw of its seeds that is not held out."""
        if self.split == "test":
            problems: tuple[Drawn, ...] = _test_split(type(self), self.part)
            return problems[index]
        return next(one for one in self.draws(f"train/{index}") if not one.is_held_out)

    def test_problems(self) -> tuple[Drawn, ...]:
        """Make the test split: the first `num_test` different draws that are held out."""
        held_out: dict[Drawn, None] = {}
        for one in self.draws("test"):
            if one.is_held_out:
                held_out.setdefault(one)
            if len(held_out) == self.num_test:
                break
        return tuple(held_out)

    def __len__(self) -> int:
        return NUM_TRAIN if self.split == "train" else len(_test_split(type(self), self.part))


@cache
def _test_split(kind: type[DrawnTask[Any]], part: str) -> tuple[Any, ...]:
    return kind("test", part).test_problems()
