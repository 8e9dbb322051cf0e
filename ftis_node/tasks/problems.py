"""Problems by index: base of the tasks that have them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Final, Protocol, TypeVar

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
    """Question and reference answer."""

    question: str
    answer: str


def stable_hash(text: str) -> int:
    """Return 64 bits that are equal on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class _Drawn(Protocol):
    @property
    def is_held_out(self) -> bool: ...


Drawn = TypeVar("Drawn", bound=_Drawn)


def training_draw(draw: Callable[[str], Drawn | None], seed: str) -> Drawn:
    """Return the first draw of the seeds `SEED/0`, `SEED/1`, ... that is a problem and not held out."""
    draws = (draw(f"{seed}/{attempt}") for attempt in count())
    return next(one for one in draws if one is not None and not one.is_held_out)


def held_out_draws(draw: Callable[[str], Drawn | None], seed: str, num: int) -> tuple[Drawn, ...]:
    """Return the first `num` different draws of these seeds that are held out."""
    found: dict[Drawn, None] = {}
    draws = (draw(f"{seed}/{attempt}") for attempt in count())
    while len(found) < num:
        one = next(draws)
        if one is not None and one.is_held_out:
            found.setdefault(one)
    return tuple(found)
