"""The known faults: the tables `[[fault]]` of `security.toml`, `exactly_once.toml` and `mathematics.toml`.

A fault replaces the text `old` of one file with `new`. `old` occurs exactly once in the file. `why` is the fault and
its effect for a user in one sentence. `tests` are paths for pytest; one of these tests finds the fault.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ftis_node.errors import UsageError

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `topic` is the stem of its file; paths are relative to the root of the repository."""

    topic: str
    name: str
    why: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied_to(self, text: str) -> str:
        """Return a file's text with the fault. Raises ValueError if `old` does not occur exactly once."""
        if (found := text.count(self.old)) != 1 or self.new == self.old:
            raise ValueError(f"{self.name}: {self.old!r} occurs {found} times in {self.file}")
        return text.replace(self.old, self.new)


def all_faults() -> list[Fault]:
    return [
        Fault(path.stem, tests=tuple(entry.pop("tests")), **entry)
        for path in sorted(FOLDER.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["fault"]
    ]


def chosen(faults: Sequence[Fault], names: Sequence[str]) -> list[Fault]:
    """Return the faults with these names or topics, or all. Raises UsageError for an unknown name."""
    known = {name for one in faults for name in (one.name, one.topic)}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"no fault {unknown[0]!r}: `python -m tests.breaks --list` prints the names")
    return [one for one in faults if not names or one.name in names or one.topic in names]
