"""Question-and-answer problems from JSON lines: a local file, or rows from the hub.

A broken line is an error with file and line number. The line number identifies the problem. If a node skipped a line,
it would disagree with its peers about all later problems. For the same reason a problem must not appear twice.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftis_node.errors import FileError, TaskError
from ftis_node.files import read_file
from ftis_node.records.group import PromptRef
from ftis_node.tasks.base import TaskItem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ftis_node.tasks.base import ChatMessage

    ReadRow = Callable[[dict[str, Any]], "Problem"]

MAX_FILE_BYTES = 4 << 30


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


@dataclass(frozen=True, slots=True)
class Problem:
    """Question and reference answer."""

    question: str
    answer: str


def problem_file(path: str, split: str) -> Path:
    """Return the file of a spec's PATH: the path itself, or `<split>.jsonl` in it if it is a folder."""
    file = Path(path).expanduser()
    return file / f"{split}.jsonl" if file.is_dir() else file


def read_problems(file: Path, read_row: ReadRow) -> tuple[Problem, ...]:
    """Return the problems of a JSON-lines file in UTF-8. Raises TaskError with file and line."""
    try:
        content = read_file(file, max_bytes=MAX_FILE_BYTES)
    except FileError as error:
        raise TaskError(f"{error}: give the path of a JSON-lines file") from None
    except OSError as error:
        raise TaskError(f"{file}: cannot be read ({error.strerror}): give the path of a JSON-lines file") from error
    return parse_problems(content.rstrip().split(b"\n") if content.strip() else [], read_row, source=str(file))


def parse_problems(lines: Iterable[bytes], read_row: ReadRow, *, source: str) -> tuple[Problem, ...]:
    """Parse one problem a line. `read_row` converts an object and raises ValueError that names its fault.

    Raises TaskError that names `source` and the line.
    """
    first_line: dict[str, int] = {}
    problems = []
    for number, line in enumerate(lines, start=1):
        try:
            problem = read_row(_parse_object(line))
        except ValueError as error:
            raise TaskError(f"{source}:{number}: {error}") from error
        if (first := first_line.setdefault(problem.question, number)) != number:
            raise TaskError(f"{source}:{number}: the same problem as in line {first}")
        problems.append(problem)
    if not problems:
        raise TaskError(f"{source}: the file has no problems")
    return tuple(problems)


def text_field(row: dict[str, Any], name: str) -> str:
    """Return the stripped text of a field. Raises ValueError if it is missing, empty or invalid."""
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"the field {name!r} must be a text and not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # such text can be neither tokenized nor hashed
        raise ValueError(f"the field {name!r} holds an unpaired surrogate") from error
    return value.strip()


def _parse_object(line: bytes) -> dict[str, Any]:
    """Return the JSON object of one line. Raises ValueError."""
    if not line.strip():
        raise ValueError("the line is empty")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"invalid JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError("the line must be a JSON object")
    return row
