"""Base of the tasks whose problems are a list of questions and answers in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ftis_node.records.group import PromptRef
from ftis_node.tasks.base import TaskItem

if TYPE_CHECKING:
    from ftis_node.tasks.base import ChatMessage
    from ftis_node.tasks.problems import Problem


class ProblemTask(ABC):
    """Problems by index. A subclass sets `name`, `split` and `_problems`, and writes the prompt of a problem."""

    name: str
    split: str
    _problems: tuple[Problem, ...]

    @abstractmethod
    def prompt_of(self, problem: Problem) -> tuple[ChatMessage, ...]:
        """Return the chat messages that ask the problem."""

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> TaskItem:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}/{self.split} has no problem {index}")
        problem = self._problems[index]
        return TaskItem(PromptRef(self.name, self.split, index), self.prompt_of(problem), problem.answer)

    def resolve(self, ref: PromptRef) -> TaskItem:
        if (ref.task, ref.split) != (self.name, self.split) or not 0 <= ref.index < len(self):
            raise KeyError(str(ref))
        return self[ref.index]
