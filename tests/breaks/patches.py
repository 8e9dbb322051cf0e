"""The known faults, one patch each: `tests/breaks/PACKAGE/[FOLDER/]NAME.patch` with a header of two lines.

Break: one sentence: the fault and its effect for a user
Tests: paths for pytest, separated by spaces
diff --git ...
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
SENTENCE, TESTS, DIFF = "Break: ", "Tests: ", "diff --git "
MAX_NAMES = 8  # in one error


@dataclass(frozen=True, slots=True)
class Break:
    """One fault. `package` is its folder of ftis_node, `tests` are paths from the root."""

    path: Path
    sentence: str
    tests: tuple[str, ...]

    @property
    def package(self) -> str:
        """The first folder of the path below tests/breaks."""
        return self.path.relative_to(FOLDER).parts[0]

    @property
    def name(self) -> str:
        """`package/name`."""
        return f"{self.package}/{self.path.stem}"

    @property
    def files(self) -> tuple[str, ...]:
        """The files that the patch changes, as paths from the root."""
        lines = self.path.read_text().splitlines()
        return tuple(line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/"))


def read_break(path: Path) -> Break:
    """Read a patch. Raises ValueError if its header lacks a line."""
    header = path.read_text().partition(DIFF)[0].splitlines()
    found = {key: [line.removeprefix(key) for line in header if line.startswith(key)] for key in (SENTENCE, TESTS)}
    for key, values in found.items():
        if len(values) != 1 or not values[0].strip():
            raise ValueError(f"{path.name} has {len(values)} lines {key.strip()!r} above its first {DIFF.strip()!r}")
    return Break(path, found[SENTENCE][0].strip(), tuple(found[TESTS][0].split()))


def all_breaks() -> list[Break]:
    """Return all faults, sorted by package and name."""
    return [read_break(path) for path in sorted(FOLDER.rglob("*.patch"))]


def chosen(breaks: Sequence[Break], names: Sequence[str]) -> list[Break]:
    """Return the faults named by `package/name` or `package`, or all. Raises UsageError for an unknown name."""
    known = {name for one in breaks for name in (one.name, one.package)}
    if unknown := [name for name in names if name not in known]:
        packages = sorted({one.package for one in breaks})
        near = [one.name for one in breaks if one.package == unknown[0].partition("/")[0]] or packages
        raise UsageError(
            f"no break {unknown[0]!r}; known: {', '.join(near[:MAX_NAMES])}{', ...' * (len(near) > MAX_NAMES)}"
        )
    return [one for one in breaks if not names or one.name in names or one.package in names]
