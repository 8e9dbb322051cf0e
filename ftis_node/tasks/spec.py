"""Task SPEC: the problems on which a node trains, as one line for a manifest or a command line.

    spec = part, or several joined by "+"
    part = arithmetic[:PART] | sums[:long] | words[:PART] | gsm8k[:PATH] | math500[:PATH]
         | dataset:SOURCE?QUERY                              rows of any data set (`dataset_query.py`)
         | rg:NAME                                           a task of reasoning-gym
         | NAME                                              a plug-in
         | TASK@REWARD                                       any of these under the reward of a plug-in
         each followed by "=WEIGHT" if several are mixed; the default weight is 1

    gsm8k:/data/gsm8k=3+rg:chain_sum=1      three GSM8K problems from local files, then one chain sum

The reward of a task with a PATH comes before the PATH: `gsm8k@brief:PATH`. A PATH may contain ":", "+" and "=". It ends
as follows:

** A "+" ends it only before a task: a word, or WORD@REWARD, followed by ":", "=", "+" or the end of the line. So
  `gsm8k:/data/a+b.jsonl` is one path. A folder whose name ends in `+word` cannot be written.
* A last "=" followed by a number is the weight. Write a weight if the path itself ends so: `gsm8k:/data/lr=3=1`.
* The path of a `dataset:` ends at the first "?". After a QUERY a second "=" begins the weight: `&config=3=2`.

The canonical form omits the paths, sorts the parts and reduces the weights. Equal canonical forms mean equal prompts.
The domain of a node is a SPEC with parts of the run's mixture in other proportions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from ftis_node.errors import TaskError
from ftis_node.tasks.dataset_query import (
    KNOWN_DATASETS,
    NUMBER,
    PREFIX,
    DatasetQuery,
    parse_dataset,
    parse_weight,
    whole_weights,
)

MAX_NAME_BYTES = 128  # of a part; the wire's bound
_JOINER = re.compile(r"\+(?=[A-Za-z][\w-]*(?:@[A-Za-z][\w-]*)?(?:[:=+]|$))")
_WEIGHT = re.compile(rf"(?P<rest>.*)=(?P<weight>{NUMBER})", re.DOTALL)
_NAME = re.compile(r"[A-Za-z][\w-]*(?::[\w-]+)?(?:@[A-Za-z][\w-]*)?")
_FILE_TASK = re.compile(rf"(?:{'|'.join(KNOWN_DATASETS)})(?:@[A-Za-z][\w-]*)?")


@dataclass(frozen=True, slots=True)
class TaskPart:
    """One task of a spec. `name` is canonical (`gsm8k`, `rg:chain_sum`, `gsm8k@brief`), `weight` is a whole number."""

    name: str
    path: str | None = None
    weight: int = 1
    query: DatasetQuery | None = None

    @property
    def problems(self) -> str:
        """Return the name of the task that gives the problems."""
        return self.name.partition("@")[0]

    @property
    def reward(self) -> str | None:
        """Return the name of the plug-in that scores completions; None if the task scores them itself."""
        return self.name.partition("@")[2] or None

    @property
    def is_dataset(self) -> bool:
        """Return whether the problems are rows of a data set that the part's `query` describes."""
        return self.name.startswith(PREFIX)

    @property
    def takes_path(self) -> bool:
        """Return whether the problems are rows of a data set, and so may come from a local file."""
        return self.is_dataset or self.problems in KNOWN_DATASETS

    @property
    def rows(self) -> DatasetQuery | None:
        """Return the query that describes the rows: the part's own, or that of its name; None if there is none."""
        return self.query or KNOWN_DATASETS.get(self.problems)

    def __str__(self) -> str:
        text = self._dataset_text() if self.is_dataset else f"{self.name}:{self.path}" if self.path else self.name
        return f"{text}={self.weight}" if self.weight != 1 or _split_weight(text)[1] is not None else text

    def _dataset_text(self) -> str:
        source, query = self.name, str(self.query or "")
        if self.path:
            source = PREFIX + (self.path if "/" in self.path else f"./{self.path}")
            query = "&".join(filter(None, [query, f"name={self.name.removeprefix(PREFIX)}"]))
        return f"{source}?{query}" if query else source


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A parsed spec: parts sorted by name, weights without a common factor. `str(spec)` can be parsed again."""

    parts: tuple[TaskPart, ...]

    @property
    def canonical(self) -> str:
        """Return the spec without paths. The run's manifest holds it, and peers compare it."""
        return "+".join(str(replace(part, path=None)) for part in self.parts)

    @property
    def paths(self) -> dict[str, str]:
        """Return the local file or folder of each part that has one, by the part's name."""
        return {part.name: part.path for part in self.parts if part.path}

    def with_paths(self, paths: Mapping[str, str]) -> TaskSpec:
        """Return the parts with the local files of `paths`, by part name. Raises TaskError for an unusable path."""
        for name, path in paths.items():
            if name.startswith(PREFIX) and "?" in path:
                raise TaskError(f"the path {path!r} of {name} holds a '?', which ends the path in a SPEC: rename it")
        return TaskSpec(
            tuple(replace(part, path=paths.get(part.name)) if part.takes_path else part for part in self.parts)
        )

    def __str__(self) -> str:
        return "+".join(str(part) for part in self.parts)


def parse_spec(text: str) -> TaskSpec:
    """Parse a task SPEC. Raises TaskError if the text is malformed.

    It does not check whether the tasks exist, because that depends on the installed plug-ins (see `load_task`).
    """
    return TaskSpec(tuple(sorted(parse_parts(text), key=lambda part: part.name)))


def parse_parts(text: str) -> list[TaskPart]:
    """Return the parts of a SPEC in the order in which it names them. Raises as `parse_spec`."""
    if not text.strip():
        raise TaskError("the task is empty: name one, such as arithmetic or gsm8k")
    drafts = [_parse_part(part) for part in _JOINER.split(text.strip())]
    names = [part.name for part, _ in drafts]
    if twice := {name for name in names if names.count(name) > 1}:
        raise TaskError(f"task {min(twice)!r} appears twice in {text!r}: name each task once and give it a weight")
    if long := next((name for name in names if len(name.encode()) > MAX_NAME_BYTES), None):
        raise TaskError(f"the task name {long[:40] + '...'!r} has more than {MAX_NAME_BYTES} bytes: shorten it")
    weights = whole_weights([weight for _, weight in drafts], text)
    return [replace(part, weight=weight) for (part, _), weight in zip(drafts, weights, strict=True)]


def _parse_part(text: str) -> tuple[TaskPart, Fraction]:
    text, given = _split_weight(text)
    weight = Fraction(1) if given is None else given
    if weight == 0:
        raise TaskError(f"task {text!r} has the weight 0: omit it, or give it a weight above 0")
    if text.startswith(PREFIX):
        label, data_path, query = parse_dataset(text.removeprefix(PREFIX))
        return TaskPart(PREFIX + label, data_path, query=query), weight
    name, colon, path = text.partition(":")
    if _FILE_TASK.fullmatch(name) and colon:
        if not path:
            raise TaskError(f"{text!r} names no file: write {name}:PATH, or {name} for the data set from the hub")
        return TaskPart(name, path), weight
    if not _NAME.fullmatch(text):
        raise TaskError(
            f"{text!r} is not a task: write NAME, NAME:ARGUMENT, NAME@REWARD or NAME=WEIGHT, several joined by '+'"
        )
    return TaskPart(text), weight


def _split_weight(text: str) -> tuple[str, Fraction | None]:
    """Return the part without its weight, and the weight if it has one."""
    match = _WEIGHT.fullmatch(text)
    if match is None:
        return text, None
    rest = match["rest"]
    if text.startswith(PREFIX) and "?" in text and "=" not in rest[max(rest.rfind("&"), rest.find("?")) + 1 :]:
        return text, None  # the last parameter of the query
    return rest, parse_weight(match["weight"])


def is_domain(spec: TaskSpec, run: TaskSpec) -> bool:
    """Return whether `spec` has only parts of `run` and is not the whole run. The run must be a mixture."""
    parts = {replace(part, path=None, weight=1) for part in run.parts}
    return all(replace(part, path=None, weight=1) in parts for part in spec.parts) and spec.canonical != run.canonical


@lru_cache(maxsize=4096)
def validated_domain(text: str, run: str) -> str:
    """Return the domain that a peer announces; "" unless it is a canonical SPEC of parts of the run's task."""
    try:
        spec = parse_spec(text)
    except TaskError:
        return ""
    return text if spec.canonical == text and is_domain(spec, parse_spec(run)) else ""
