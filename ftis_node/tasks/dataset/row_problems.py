"""Problems of a data set, and the digest by which the members of a run compare them.

Problem i is the i-th different question, in the order of the rows: a row that repeats an earlier question is left out.
The digest is SHA-256 over one line per problem, `["QUESTION","ANSWER"]` in JSON without spaces, in UTF-8, each ended by
a line feed. It does not depend on the file's format.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftis_node.errors import TaskError
from ftis_node.tasks.dataset.query import DIGEST_HEX, FILE_SUFFIXES
from ftis_node.tasks.dataset.rows import RowSource, read_rows
from ftis_node.tasks.problems import Problem

if TYPE_CHECKING:
    from ftis_node.tasks.dataset.query import DatasetQuery
    from ftis_node.tasks.spec import TaskPart

log = logging.getLogger(__name__)


def digest_of(problems: tuple[Problem, ...]) -> str:
    """Return the digest of the problems, in hex."""
    digest = hashlib.sha256()
    for problem in problems:
        line = json.dumps([problem.question, problem.answer], ensure_ascii=False, separators=(",", ":"))
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()[:DIGEST_HEX]


def load_problems(part: TaskPart, split: str) -> tuple[Problem, ...]:
    """Return the problems of a split. Raises TaskError, and NetworkError if the hub cannot be reached."""
    if part.query is None:
        raise TaskError(f"{part} names no columns: add prompt=COLUMN&answer=COLUMN, or name the run that has them")
    source = _source(part, part.query, split)
    stat = Path(source.file).stat() if source.file and Path(source.file).is_file() else None
    return _read(source, part.query.after, stat and (stat.st_mtime_ns, stat.st_size, stat.st_ino))


def has_test_split(part: TaskPart) -> bool:
    """Return whether the data set has held-out problems: a folder with a test file, or a split that the query names."""
    if part.path:
        folder = Path(part.path).expanduser()
        return folder.is_dir() and _file_in(folder, "test") is not None
    return bool(part.query and part.query.hub and part.query.test)


def _source(part: TaskPart, query: DatasetQuery, split: str) -> RowSource:
    if part.path:
        file = Path(part.path).expanduser()
        found = _file_in(file, split) if file.is_dir() else file
        if found is None:
            raise TaskError(f"{file} has none of {', '.join(split + suffix for suffix in FILE_SUFFIXES)}")
        return RowSource(query.columns, file=str(found))
    if not query.hub:
        name = part.name.partition(":")[2]
        raise TaskError(f"{part.name} needs the run's data file: give it as --task dataset:PATH?name={name}")
    named = {"train": query.split, "test": query.test}[split]
    if not named:
        raise TaskError(f"{part.name} names no split of held-out problems: add test=SPLIT")
    return RowSource(query.columns, hub=query.hub, config=query.config, revision=query.revision, split=named)


def _file_in(folder: Path, split: str) -> Path | None:
    files = (folder / (split + suffix) for suffix in FILE_SUFFIXES)
    return next((file for file in files if file.is_file()), None)


@lru_cache(maxsize=2)
def _read(source: RowSource, after: str, version: object) -> tuple[Problem, ...]:
    """Return the problems from a cache: a start needs them for the run's digest and for its task.

    `version` distinguishes the contents of a file that changed.
    """
    problems: dict[str, Problem] = {}
    num_rows = 0
    for num_rows, cells in enumerate(read_rows(source), start=1):
        try:
            question = _text(cells[0], source.columns[0])
            answer = _reference(cells[1], source.columns[1], after) if len(cells) > 1 else ""
        except ValueError as error:
            raise TaskError(f"{source}: row {num_rows}: {error}") from None
        problems.setdefault(question, Problem(question, answer))
    if not problems:
        raise TaskError(f"{source} has no rows")
    if num_rows > len(problems):
        num_left_out = num_rows - len(problems)
        log.info("%s: %d of %d rows repeat an earlier question and are left out", source, num_left_out, num_rows)
    return tuple(problems.values())


def _reference(cell: Any, column: str, after: str) -> str:
    """Return the reference answer, without what precedes the last marker. Raises ValueError."""
    text = _text(cell, column)
    if after:
        _, marker, text = text.rpartition(after)
        if not marker or not text.strip():
            raise ValueError(f"the column {column!r} has no text after {after!r}")
    return text.strip()


def _text(cell: Any, column: str) -> str:
    """Return a cell as stripped text. Raises ValueError unless it is a text or a finite number."""
    is_number = type(cell) is int or (isinstance(cell, float) and math.isfinite(cell))
    if not is_number and not isinstance(cell, str):
        raise ValueError(f"the column {column!r} must be a text or a number")
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    text = str(cell).strip()
    if not text:
        raise ValueError(f"the column {column!r} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # such text can be neither tokenized nor hashed
        raise ValueError(f"the column {column!r} holds half of a surrogate pair") from error
    return text
