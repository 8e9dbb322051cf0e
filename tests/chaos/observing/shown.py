"""Which lines of a node's files show a violation: those that name what the violation's figures name.

The figures name groups by the first 12 digits of their id, steps, numbers, versions and processes. A line of the trail
is taken where a field of it has that value, a line of a log where it has the word.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from ftis_node.telemetry.events import event_log_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

GROUP = re.compile(r"\b[0-9a-f]{12}\b")
NUMBERED = re.compile(r"\b(steps?|numbers?|versions?|own groups?|pid)\b[^0-9]{0,12}(\d+)(?:(?: to |, )(\d+))?")
FIELDS = {"step": ("step",), "number": ("number",), "own group": ("number",), "version": ("version", "policy_version")}
MOST_LINES = 60  # of one violation
MOST_A_WORD = 12
LAST_LINES = 8  # of the trail and of the log, whatever they say
MOST_LETTERS = 400


def lines_that_show(figures: str, *, trail: Path, log: Path) -> list[str]:
    """`events.jsonl:812: {...}` for each line, in the files' order; last the newest lines of both."""
    events = [line for file in event_log_files(trail) for line in _numbered(file)]
    words = _numbered(log)
    found = [line for test in _tests(figures) for line in _some(_that(test, events))]
    found += [line for word in _words(figures) for line in _some(line for line in words if word in line[1])]
    told = dict.fromkeys([*found[:MOST_LINES], *events[-LAST_LINES:], *words[-LAST_LINES:]])
    return [f"{place}: {text[:MOST_LETTERS]}" for place, text in told]


def _tests(figures: str) -> Iterator[Callable[[dict[str, Any]], bool]]:
    """What an event must have, for each thing that the figures name."""
    for group in GROUP.findall(figures):
        yield lambda event, group=group: str(event.get("group", "")).startswith(group)
    for kind, first, last in NUMBERED.findall(figures):
        names = FIELDS.get(kind.removesuffix("s"), ())
        values = {int(first), int(last or first)}
        yield lambda event, names=names, values=values: any(event.get(name) in values for name in names)


def _words(figures: str) -> list[str]:
    """What a line of a log must have."""
    pids = [first for kind, first, _ in NUMBERED.findall(figures) if kind == "pid"]
    return [*GROUP.findall(figures), *(f"pid {pid}" for pid in pids)]


def _that(test: Callable[[dict[str, Any]], bool], events: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for place, text in events:
        try:
            event = json.loads(text)
        except ValueError:
            continue  # a line that a fault has damaged
        if isinstance(event, dict) and test(event):
            yield place, text


def _some(lines: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The first and the last of them."""
    found = list(lines)
    half = MOST_A_WORD // 2
    return found if len(found) <= MOST_A_WORD else [*found[:half], *found[-half:]]


def _numbered(file: Path) -> list[tuple[str, str]]:
    """The file's lines with where they stand; none of a file that is not there."""
    try:
        text = file.read_text(errors="replace")
    except FileNotFoundError:
        return []
    return [(f"{file.name}:{number}", line) for number, line in enumerate(text.splitlines(), start=1)]
