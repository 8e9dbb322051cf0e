"""QUERY of a `dataset:` task: which columns are problems, and what a completion earns.

    dataset:SOURCE?prompt=COLUMN&answer=COLUMN&reward=math:1,format:0.2

docs/train/tasks.md has the parameters. The start of a run writes two more: `hub`, the repository, and `sha256`. The
canonical form sorts the parameters, omits defaults and reduces the weights, so that equal queries are equal text.

RE2 runs in time linear in the text, so no completion can make it backtrack. It gives the same result on every machine.
Only child processes call it, through pyarrow, which takes a daemon's memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from math import gcd, lcm
from typing import Final
from urllib.parse import quote, unquote

from ftis_node.errors import TaskError

PREFIX: Final = "dataset:"
BUILT_IN_REWARDS: Final = ("exact", "format", "math", "regex")
FILE_SUFFIXES: Final = (".jsonl", ".parquet", ".csv")
STYLES: Final = ("think", "plain")
DIGEST_HEX: Final = 32
MAX_VALUE_CHARS: Final = 256
MAX_REWARDS: Final = 8
_LABEL = re.compile(r"[A-Za-z0-9_][\w-]{0,63}", re.ASCII)
_REWARD = re.compile(r"(?P<name>[A-Za-z][\w-]{0,63})(?::(?P<weight>[^:]*))?", re.ASCII)
_PART_NAME = re.compile(r"(?!.*\.\.)(?!.*//)\w[\w./\[\]:%+-]{0,95}", re.ASCII)  # no path, no address
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)  # and no path such as ../x
_SAFE = "/,:#^$()[]{}|*\\!;@<>'"
MAX_TOTAL_WEIGHT: Final = 1000  # after reduction; bounds the length of a mixture's pattern
NUMBER: Final = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"


def parse_weight(text: str) -> Fraction | None:
    """Return the weight in decimal digits; None if the text is no number."""
    return Fraction(text) if re.fullmatch(NUMBER, text) else None


def whole_weights(weights: Sequence[Fraction], text: str) -> list[int]:
    """Return the smallest whole numbers in the same proportions. Raises TaskError if their sum is too large."""
    scale = lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    divisor = gcd(*whole)
    reduced = [weight // divisor for weight in whole]
    if sum(reduced) > MAX_TOTAL_WEIGHT:
        raise TaskError(
            f"the weights in {text!r} differ too much: as whole numbers they add up to {sum(reduced):,}, "
            f"at most {MAX_TOTAL_WEIGHT:,}"
        )
    return reduced


@dataclass(frozen=True, slots=True)
class RowSource:
    """Local `file`, or a `split` of a repository `hub`; the columns to read, and a pattern to check."""

    columns: tuple[str, ...]
    file: str = ""
    hub: str = ""
    config: str = ""
    revision: str = ""
    split: str = ""
    pattern: str = ""

    def __str__(self) -> str:
        return self.file or f"{self.hub} ({self.split})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetQuery:
    """Parsed QUERY. `reward` holds names with whole-number weights, sorted; all other fields are the parameters."""

    prompt: str
    answer: str = ""
    after: str = ""
    reward: tuple[tuple[str, int], ...] = (("math", 1),)
    pattern: str = ""
    style: str = "think"
    hub: str = ""
    config: str = ""
    revision: str = ""
    split: str = "train"
    test: str = ""
    sha256: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns to read: `prompt`, and `answer` if it is set."""
        return (self.prompt, self.answer) if self.answer else (self.prompt,)

    def without_source(self) -> DatasetQuery:
        """Return the columns and rewards alone."""
        return replace(self, hub="", config="", revision="", split="train", test="", sha256="")

    def __str__(self) -> str:
        values = {field: getattr(self, field.name) for field in fields(self)}
        shown = {field.name: value for field, value in values.items() if value != field.default}
        if "reward" in shown:
            shown["reward"] = ",".join(name if weight == 1 else f"{name}:{weight}" for name, weight in self.reward)
        return "&".join(f"{name}={quote(value, safe=_SAFE)}" for name, value in sorted(shown.items()))


KNOWN_DATASETS: Final = {
    # 7,473 training and 1,319 test problems whose answers are numbers (arXiv 2110.14168, MIT license)
    "gsm8k": DatasetQuery(
        prompt="question", answer="answer", after="####", hub="openai/gsm8k", config="main", test="test"
    ),
    # 500 of MATH's test problems, with answers in LaTeX (arXiv 2305.20050, MIT license); no training problems
    "math500": DatasetQuery(
        prompt="problem", answer="answer", hub="HuggingFaceH4/MATH-500", config="default", split="", test="test"
    ),
}
"""Data sets with a fixed query, by their task names."""
_PARAMETERS: Final = frozenset({field.name for field in fields(DatasetQuery)} | {"name"})


def parse_dataset(text: str) -> tuple[str, str | None, DatasetQuery | None]:
    """Return the name, the path and the query of SOURCE or SOURCE?QUERY. Raises TaskError.

    Without a query, or with a name alone, the columns are those of the run.
    """
    source, mark, query_text = text.partition("?")
    values = _values(query_text) if mark else {}
    label, path, hub = _source(source, label=values.pop("name", ""))
    if not values:
        return label, path, None
    if hub and values.setdefault("hub", hub) != hub:
        raise TaskError(f"dataset:{source} has another hub={values['hub']}: omit one of the two")
    return label, path, _checked(values, text)


def _source(source: str, *, label: str) -> tuple[str, str | None, str]:
    """Return the name, the path or None, and the repository of the hub or ""."""
    if not source:
        raise TaskError("dataset: names no data: write dataset:OWNER/NAME?QUERY or dataset:PATH?QUERY")
    if _LABEL.fullmatch(source):
        return label or source, None, ""
    is_path = source.startswith(("/", "./", "../", "~")) or source.endswith(FILE_SUFFIXES) or source.count("/") > 1
    if not is_path and not _REPOSITORY.fullmatch(source):
        raise TaskError(
            f"dataset:{source} is neither a repository of the hub (OWNER/NAME) nor a path: a path begins with / or ./, "
            f"or ends in {', '.join(FILE_SUFFIXES)}"
        )
    last = source.rstrip("/").rpartition("/")[2]
    stem = next((last.removesuffix(suffix) for suffix in FILE_SUFFIXES if last.endswith(suffix)), last)
    label = label or re.sub(r"[^\w-]", "-", stem, flags=re.ASCII).strip("-")[:64]
    if not _LABEL.fullmatch(label):
        raise TaskError(f"dataset:{source} gives no name for peers: add &name=NAME of letters, digits, _ and -")
    if not is_path:
        return label, None, source
    return label, source if "/" in source else f"./{source}", ""


def _values(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for pair in text.split("&"):
        name, equals, value = pair.partition("=")
        if not equals or name not in _PARAMETERS:
            raise TaskError(
                f"{pair!r} is no parameter of a data set, which are NAME=VALUE with {', '.join(sorted(_PARAMETERS))}"
            )
        if name in values:
            raise TaskError(f"the parameter {name!r} appears twice")
        value = unquote(value)
        if not value or len(value) > MAX_VALUE_CHARS or not value.isprintable():
            raise TaskError(f"the parameter {name!r} must have 1 to {MAX_VALUE_CHARS} printable characters")
        values[name] = value
    return values


def _checked(values: dict[str, str], text: str) -> DatasetQuery:
    if "prompt" not in values:
        raise TaskError(f"dataset:{text} names no column of questions: add prompt=COLUMN")
    rewards = _rewards(values.pop("reward", "math"))
    query = DatasetQuery(**values, reward=rewards)
    if query.style not in STYLES:
        raise TaskError(f"unknown style {query.style!r}: use {' or '.join(STYLES)}")
    names = {name for name, _ in rewards}
    if ("regex" in names) != bool(query.pattern):
        raise TaskError("the reward regex and pattern=REGEX need each other: write both or none")
    if not query.answer and (needs := sorted(names & {"exact", "math"})):
        raise TaskError(f"the reward {needs[0]} compares with a reference: add answer=COLUMN")
    if query.after and not query.answer:
        raise TaskError("after=MARKER reads the column of answers: add answer=COLUMN")
    if "format" in names and query.style != "think":
        raise TaskError("the reward format looks for think and answer blocks: omit it, or style=plain")
    if query.hub and not _REPOSITORY.fullmatch(query.hub):
        raise TaskError(f"hub={query.hub} is no repository of the hub: write OWNER/NAME")
    for name in ("config", "revision", "split", "test"):
        if (value := getattr(query, name)) and not _PART_NAME.fullmatch(value):
            raise TaskError(f"{name}={value:.80} is no name of a part of a data set")
    if query.sha256 and not re.fullmatch(rf"[0-9a-f]{{{DIGEST_HEX}}}", query.sha256):
        raise TaskError(f"sha256 must have {DIGEST_HEX} hex digits: the start of a run writes it")
    return query


def _rewards(text: str) -> tuple[tuple[str, int], ...]:
    found = [_REWARD.fullmatch(part) for part in text.split(",")]
    names = [match["name"] if match else "" for match in found]
    weights = [parse_weight("1" if match["weight"] is None else match["weight"]) if match else None for match in found]
    if None in weights or 0 in weights or len(set(names)) != len(names) or len(names) > MAX_REWARDS:
        raise TaskError(
            f"reward={text} is malformed: write up to {MAX_REWARDS} different names with weights above 0, such as "
            "math:1,format:0.2"
        )
    whole = whole_weights([weight for weight in weights if weight is not None], f"reward={text}")
    return tuple(sorted(zip(names, whole, strict=True)))


def finds(pattern: str, text: str) -> bool:
    """Return whether the pattern matches a part of the text, which must be valid Unicode."""
    import pyarrow
    from pyarrow.compute import match_substring_regex

    pool = pyarrow.system_memory_pool()  # the default pool reserves addresses, of which a scorer has 1 GiB
    found = match_substring_regex(pyarrow.scalar(text, memory_pool=pool), pattern, memory_pool=pool)
    return bool(found.as_py())


def check_pattern(pattern: str) -> None:
    """Raise TaskError for an invalid pattern."""
    try:
        finds(pattern, "")
    except Exception as error:
        reason = " ".join(str(error).split())
        raise TaskError(f"pattern={pattern} cannot be used: {reason} (the syntax is that of RE2)") from None
