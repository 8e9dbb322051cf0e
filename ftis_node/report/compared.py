"""Answers before and after training, from a file that `ftis-node eval --home H --show 5 --json` printed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ftis_node.errors import FileError, UsageError
from ftis_node.files import read_text
from ftis_node.report.templates import clean, without_paths

MAX_PROBLEMS, MAX_TEXT = 5, 600


class GivenAnswer(msgspec.Struct, frozen=True):
    text: str
    is_right: bool


class AnsweredProblem(msgspec.Struct, frozen=True):
    problem: str
    right_answer: str
    before: GivenAnswer
    after: GivenAnswer

    def shown(self) -> dict[str, str]:
        texts = {"problem": self.problem, "correct": self.right_answer}
        texts |= {"before": self.before.text, "after": self.after.text}
        return {name: clean(text.strip(), limit=MAX_TEXT) for name, text in texts.items()}


class Accuracy(msgspec.Struct, frozen=True):
    model: str
    pass_at_1: float
    n: int

    @property
    def name(self) -> str:
        return clean(without_paths(self.model), limit=60)


class ChangedProblems(msgspec.Struct, frozen=True):
    gained: int
    lost: int


class Compared(Accuracy, frozen=True, kw_only=True):
    """An evaluation of two models: the fields of `Accuracy` are of the trained one, `compared` is the other."""

    task: str
    compared: Accuracy
    problems: tuple[AnsweredProblem, ...]
    difference: ChangedProblems | None = None


def read_compared(path: Path) -> Compared:
    """Return the evaluation in the file. Raises UsageError for another file."""
    try:
        return msgspec.json.decode(read_text(path), type=Compared)
    except (OSError, FileError, msgspec.DecodeError) as error:
        command = "ftis-node eval --model TRAINED --task SPEC --compare BASE --show 5 --json"
        raise UsageError(f"{path} cannot be used ({error}): write it with `{command}`") from None
