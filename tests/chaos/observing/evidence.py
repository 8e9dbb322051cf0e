"""What is kept of a run with a violation: enough to find its cause when the run is long over.

    chaos-out/SEED-TIME/
        run.log             the lines of the run
        timeline.jsonl      when each fault began, was done and was judged, on which node, and how busy the machine was
        violations/001-a/   of each look that found any, at that moment:
            report.txt        invariant, fault before it, node, time, machine, and the lines of files that show it
            seen.json         what was looked at, before the fault and after it
            judged.jsonl      the trail and the buffer's rows as they were judged, where the files were harmed since
            home/, node.log   the node's files
        a/, a.log, ...      homes and logs as they are at the end
        left-out.txt        what was not copied, and why

A look is written down at once: a node goes on after a violation, and its files change. Lines that show a violation name
what its figures name: groups by the first 12 digits of their id, steps, numbers, versions and processes. A line of the
trail is taken where a field of it has that value, a line of a log where it has the word.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any

from ftis_node.config.home import Home
from ftis_node.telemetry.events import event_log_files
from tests.chaos.machine import Busy, Meter
from tests.chaos.observing.copies import MIB, Copier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from tests.chaos.invariants.checks import Violation
    from tests.chaos.observing.observe import Observation
    from tests.chaos.schedule import Planned
    from tests.chaos.swarm import SwarmNode

MOST_COPIED_LOOKS = 6  # of more, the report alone: where one invariant is broken the next look finds it again
MOST_OF_A_LOOK = 24 * MIB
MOST_JUDGED = 20_000  # events, and rows
MOST_KEPT_RUNS = 10
LAST_FAULTS = 4
REPORT = "report.txt"
GROUP = re.compile(r"\b[0-9a-f]{12}\b")
NUMBERED = re.compile(r"\b(steps?|numbers?|versions?|own groups?|pid)\b[^0-9]{0,12}(\d+)(?:(?: to |, )(\d+))?")
FIELDS = {"step": ("step",), "number": ("number",), "own group": ("number",), "version": ("version", "policy_version")}
MOST_LINES = 60  # of one violation
MOST_A_WORD = 12
LAST_LINES = 8  # of the trail and of the log, whatever they say
MOST_LETTERS = 400


class Evidence:
    """Of one run, whose work is done in `folder`. May be used by several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_looks = 0
        self._timeline: list[dict[str, Any]] = []
        self._writing = threading.RLock()
        self._meter = Meter()
        self._copied = Copier()
        (folder / "violations").mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        """A line of the run."""
        with self._writing, (self.folder / "run.log").open("a") as log:
            log.write(f"{text}\n")

    def note(self, what: str, planned: Planned, *, notes: Sequence[str] = (), busy: Busy | None = None) -> None:
        """A moment of a fault's: it begins, is done, or was judged."""
        entry: dict[str, Any] = {"at": round(time.time(), 3), "run_s": round(self._meter.read().seconds, 1)}
        entry |= {"node": planned.node, "number": planned.number, "fault": planned.fault, "what": what}
        entry |= {"notes": list(notes)} if notes else {}
        entry |= {"machine": str(busy)} if busy else {}
        with self._writing:
            self._timeline.append(entry)
            with (self.folder / "timeline.jsonl").open("a") as timeline:
                timeline.write(json.dumps(entry) + "\n")

    def look(
        self,
        node: SwarmNode,
        found: Sequence[Violation],
        *,
        seen: Sequence[Observation],
        busy: Busy | None = None,
    ) -> None:
        """Writes down a look at a node that found violations, and copies its files. Nothing where it found none.

        `seen`: what was looked at, the moment before the fault first, the present one last.
        """
        if not found:
            return
        with self._writing:
            self.num_looks += 1
            place = self.folder / "violations" / f"{self.num_looks:03}-{node.name}"
            place.mkdir()
            (place / REPORT).write_text(self._report(node, found, busy or self._meter.read()))
            _write_seen(place, seen)
            if self.num_looks <= MOST_COPIED_LOOKS:
                copier = Copier(MOST_OF_A_LOOK)
                copier.copy(node.process.log, place / "node.log")
                copier.copy(node.home, place / "home")
                self._copied.left_out += [f"{place.name}: {one}" for one in copier.left_out]

    def _report(self, node: SwarmNode, found: Sequence[Violation], busy: Busy) -> str:
        before = [entry for entry in self._timeline if entry["node"] == node.name]
        others = {entry["node"]: entry for entry in self._timeline if entry["node"] != node.name}
        lines = [
            f"time: {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}, {self._meter.read().seconds:.0f} s in"
        ]
        lines += [f"machine: {busy}", f"node: {node.name} ({node.role}), home {node.home}"]
        lines += ["its last faults:", *(f"    {json.dumps(entry)}" for entry in before[-3 * LAST_FAULTS :])]
        lines += ["the others' last:", *(f"    {json.dumps(entry)}" for entry in others.values())]
        for violation in found:
            lines += ["", f"VIOLATION {violation}", f"    fault: {violation.fault or 'none, at the end of the run'}"]
            shown = lines_that_show(violation.figures, trail=Home(node.home).events, log=node.process.log)
            lines += [f"    {line}" for line in shown]
        return "\n".join(lines) + "\n"

    def keep(self, to: Path) -> list[str]:
        """Copies what is kept to `to`, a new folder; says so in lines. Call it when every node is stopped."""
        to.mkdir(parents=True)
        with self._writing:
            for name in ("run.log", "timeline.jsonl", "run.toml"):
                if (self.folder / name).exists():
                    shutil.copyfile(self.folder / name, to / name)
            shutil.copytree(self.folder / "violations", to / "violations", dirs_exist_ok=True)
            for log in sorted(set(self.folder.glob("*.log")) - {self.folder / "run.log"}):
                self._copied.copy(log, to / log.name)
                self._copied.copy(log.with_suffix(""), to / log.stem)
            (to / "left-out.txt").write_text("".join(f"{one}\n" for one in self._copied.left_out))
        size = sum(path.stat().st_size for path in to.rglob("*") if path.is_file())
        left_out = f"; {len(self._copied.left_out)} files left out: see left-out.txt" if self._copied.left_out else ""
        reports = [f"  {path.relative_to(to)}" for path in sorted(to.glob(f"violations/*/{REPORT}"))]
        return [f"kept in {to} ({size / MIB:.1f} MiB{left_out})", *reports]


def rotate(folder: Path) -> list[str]:
    """Removes the oldest kept runs in `folder`, so that one more makes no more than so many; says so in lines."""
    kept = [path for path in folder.glob("*-*") if (path / "left-out.txt").exists()]
    oldest = sorted(kept, key=lambda path: path.stat().st_mtime)[: max(0, len(kept) - MOST_KEPT_RUNS + 1)]
    for path in oldest:
        shutil.rmtree(path)
    return [f"removed {path}: the newest {MOST_KEPT_RUNS} kept runs stay" for path in oldest]


def _write_seen(place: Path, seen: Sequence[Observation]) -> None:
    """The looks without their trail and rows, and of the last one those, too."""
    looks = [dataclasses.replace(one, events=(), buffer=None) for one in seen]
    (place / "seen.json").write_text(json.dumps([_plain(one) for one in looks], indent=1))
    if not seen:
        return
    last = seen[-1]
    rows = last.buffer.rows if last.buffer else ()
    with (place / "judged.jsonl").open("w") as file:
        for event in last.events[-MOST_JUDGED:]:
            file.write(json.dumps({"time": event.time, "event": event.name, **event.fields}) + "\n")
        for row in rows[-MOST_JUDGED:]:
            file.write(json.dumps({"row": dataclasses.asdict(row)}) + "\n")


def _plain(value: Any) -> Any:
    """As JSON can have it: dataclasses as objects, the keys of tables as words."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


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
