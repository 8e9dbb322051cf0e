"""Base of the mathematics data sets: problems from a file or the hub, the think-answer format, math-verify.

Each data set is a subclass in a separate file that names the source of the rows and reads one row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from ftis_node.errors import TaskError
from ftis_node.tasks.hub import fetch_rows
from ftis_node.tasks.math.equivalence import answers_agree, plain_answer
from ftis_node.tasks.math.think_answer import chat_prompt, final_answer
from ftis_node.tasks.problems import Problem, ProblemTask, parse_problems, problem_file, read_problems

if TYPE_CHECKING:
    from ftis_node.tasks.base import ChatMessage, TaskItem


class MathTask(ProblemTask, ABC):
    """One split of a data set, from a local path or the hub.

    `path` is a JSON-lines file with the requested split, or a folder of `train.jsonl` and `test.jsonl`. Raises
    TaskError for a broken file or a missing split, NetworkError if the hub cannot be reached.
    """

    hub_name: ClassVar[str]
    hub_config: ClassVar[str]
    hub_splits: ClassVar[tuple[str, ...]]
    isolate_scoring: ClassVar[bool] = True

    def __init__(self, split: str = "train", *, path: str | None = None) -> None:
        self.split = split
        self._problems = self._read_file(path) if path else self._fetch()

    def prompt_of(self, problem: Problem) -> tuple[ChatMessage, ...]:
        return chat_prompt(problem.question)

    @staticmethod
    @abstractmethod
    def read_row(row: dict[str, Any]) -> Problem:
        """Return the problem of one row. Raises ValueError that names the fault."""

    def score(self, item: TaskItem, completion_text: str) -> float:
        """Return 1 if the format is valid and the answer equals the reference, else 0."""
        answer = final_answer(completion_text)
        return 1.0 if answer and answers_agree(item.answer, answer) else 0.0

    def answer_of(self, item: TaskItem, completion_text: str) -> str | None:
        """Return the content of the answer block, plain numbers normalized; None if the format is broken."""
        answer = final_answer(completion_text)
        return plain_answer(answer) if answer else None

    def _read_file(self, path: str) -> tuple[Problem, ...]:
        return read_problems(problem_file(path, self.split), self.read_row)

    def _fetch(self) -> tuple[Problem, ...]:
        if self.split not in self.hub_splits:
            raise TaskError(
                f"{self.name} is for evaluation, it has no split {self.split!r}: train on another task, "
                f"or give a file of training problems as {self.name}:PATH"
            )
        rows = fetch_rows(self.hub_name, config=self.hub_config, split=self.split, task=self.name)
        return parse_problems(rows, self.read_row, source=f"{self.hub_name} ({self.split})")
