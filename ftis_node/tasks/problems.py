"""Problems by index: base of the tasks that have them, and problems from JSON lines.

A broken line is an error with file and line number. The line number identifies the problem. If a node skipped a line,
it would disagree with its peers about all later problems. For the same reason a problem must not appear twice.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftis_node.errors import FileError, TaskError
from ftis_node.files import read_file
from ftis_node.records.group import PromptRef
from ftis_node.tasks.base import TaskItem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ftis_node.tasks.base import ChatMessage

    Prompt = tuple[ChatMessage, ...]

MAX_FILE_BYTES = 4 << 30


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


class ProblemTask(IndexedTask):
    """Problems in memory. A subclass sets `_problems`, and writes the prompt of a problem."""

    _problems: tuple[Problem, ...]

    @abstractmethod
    def prompt_of(self, problem: Problem) -> Prompt:
        """Return the chat messages that ask the problem."""

    def __len__(self) -> int:
        return len(self._problems)

    def prompt_and_answer(self, index: int) -> tuple[Prompt, str]:
        problem = self._problems[index]
        return self.prompt_of(problem), problem.answer


@dataclass(frozen=True, slots=True)
class Problem:
    """Question and reference answer."""

    question: str
    answer: str


def problem_file(path: str, split: str) -> Path:
    """Return the file of a spec's PATH: the path itself, or `<split>.jsonl` in it if it is a folder."""
    file = Path(path).expanduser()
    return file / f"{split}.jsonl" if file.is_dir() else file


def read_problems(file: Path, read_row: Callable[[dict[str, Any]], Problem]) -> tuple[Problem, ...]:
    """Return the problems of a JSON-lines file in UTF-8. Raises TaskError with file and line."""
    try:
        content = read_file(file, max_bytes=MAX_FILE_BYTES)
    except FileError as error:
        raise TaskError(f"{error}: give the path of a JSON-lines file") from None
    except OSError as error:
        raise TaskError(f"{file}: cannot be read ({error.strerror}): give the path of a JSON-lines file") from error
    lines = content.rstrip().split(b"\n") if content.strip() else []
    return parse_problems(lines, lambda line: read_row(parse_object(line)), source=str(file))


def parse_problems(rows: Iterable[Any], read_row: Callable[[Any], Problem], *, source: str) -> tuple[Problem, ...]:
    """Parse one problem a row. `read_row` raises ValueError that names the fault of a row.

    Raises TaskError that names `source` and the number of the row.
    """
    first_line: dict[str, int] = {}
    problems = []
    for number, row in enumerate(rows, start=1):
        try:
            problem = read_row(row)
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
    return valid_text(value, f"the field {name!r}")


def valid_text(text: str, what: str) -> str:
    """Return the stripped text. Raises ValueError that names `what` if it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # such text can be neither tokenized nor hashed
        raise ValueError(f"{what} holds an unpaired surrogate") from error
    return text.strip()


def stable_hash(text: str) -> int:
    """Return 64 bits that are equal on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def parse_object(line: bytes) -> dict[str, Any]:
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
