r"""Mathematics data sets: problems from a file or the hub, the think-answer format, math-verify.

GSM8K: grade-school word problems whose answers are whole numbers (arXiv 2110.14168, MIT license).

A line of the file, shortened; the number after `####` is the reference, thousands separators removed:

    {"question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. ...",
     "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold ... altogether ...\n#### 72"}

    "<think> 48 + 24 </think> <answer> 72 clips </answer>"   reward 1
    "<think> 48 + 24 </think> <answer> 71 </answer>"         reward 0
    "The answer is 72."                                      reward 0: the format is part of the task

MATH-500: 500 competition problems for evaluation, the test set of arXiv 2305.20050 drawn from MATH (MIT license).

A line of the file, shortened; answers are LaTeX:

    {"problem": "Convert the point $(0,3)$ in rectangular coordinates to polar coordinates. ...",
     "solution": "...", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "subject": "Precalculus", "level": 2, ...}

    "<think> r = 3 </think> <answer> $(3, \pi/2)$ </answer>"   reward 1

There is a test split alone. MATH's own training problems have the same form: to train on them, give their file.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from ftis_node.errors import TaskError
from ftis_node.tasks.answers import answers_agree, chat_prompt, final_answer, plain_answer
from ftis_node.tasks.dataset_rows import RowSource, read_rows
from ftis_node.tasks.problems import Problem, ProblemTask, parse_problems, problem_file, read_problems, text_field

if TYPE_CHECKING:
    from ftis_node.tasks.base import TaskItem
    from ftis_node.tasks.problems import Prompt

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class MathTask(ProblemTask):
    """One split of a data set, from a local path or the hub.

    `path` is a JSON-lines file with the requested split, or a folder of `train.jsonl` and `test.jsonl`. Raises
    TaskError for a broken file or a missing split, NetworkError if the hub cannot be reached.
    """

    hub_name: ClassVar[str]
    hub_config: ClassVar[str]
    hub_splits: ClassVar[tuple[str, ...]]
    columns: ClassVar[tuple[str, ...]]
    isolate_scoring: ClassVar[bool] = True

    def __init__(self, split: str = "train", *, path: str | None = None) -> None:
        self.split = split
        self._problems = read_problems(problem_file(path, split), self.read_row) if path else self._fetch()

    def prompt_of(self, problem: Problem) -> Prompt:
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

    def _fetch(self) -> tuple[Problem, ...]:
        if self.split not in self.hub_splits:
            raise TaskError(
                f"{self.name} is for evaluation, it has no split {self.split!r}: train on another task, "
                f"or give a file of training problems as {self.name}:PATH"
            )
        source = RowSource(self.columns, hub=self.hub_name, config=self.hub_config, split=self.split)
        rows = (dict(zip(self.columns, row, strict=True)) for row in read_rows(source, instead=f"{self.name}:PATH"))
        return parse_problems(rows, self.read_row, source=str(source))


class Gsm8kTask(MathTask):
    """7,473 training and 1,319 test problems; with a PATH any file of the same format."""

    name = "gsm8k"
    hub_name: ClassVar[str] = "openai/gsm8k"
    hub_config: ClassVar[str] = "main"
    hub_splits: ClassVar[tuple[str, ...]] = ("train", "test")
    columns: ClassVar[tuple[str, ...]] = ("question", "answer")

    @staticmethod
    def read_row(row: dict[str, Any]) -> Problem:
        _, marker, number = text_field(row, "answer").rpartition("####")
        number = number.strip().replace(",", "")
        if not marker or not _NUMBER.fullmatch(number):
            raise ValueError("the field 'answer' must end in '#### N' with a number N")
        return Problem(text_field(row, "question"), number)


class Math500Task(MathTask):
    """500 test problems; with a PATH any file of the same format."""

    name = "math500"
    hub_name: ClassVar[str] = "HuggingFaceH4/MATH-500"
    hub_config: ClassVar[str] = "default"
    hub_splits: ClassVar[tuple[str, ...]] = ("test",)
    columns: ClassVar[tuple[str, ...]] = ("problem", "answer")

    @staticmethod
    def read_row(row: dict[str, Any]) -> Problem:
        return Problem(text_field(row, "problem"), text_field(row, "answer"))
