"""Problems by index: base of the tasks that have them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from hashlib import blake2b

from ftis_node.records.group import PromptRef
from ftis_node.tasks.base import ChatMessage, TaskItem

Prompt = tuple[ChatMessage, ...]


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
