"""The files that are kept of a run with a violation, to find its cause later.

    chaos-out/SEED-TIME/
        run.log             the printed lines
        timeline.jsonl      when each fault began, was injected and was checked, with node and load
        violations/001-a/   a record of each observation with a violation:
            report.txt        invariant, fault, node, time, machine, and the matching lines of event log and log
            seen.json         the observations before and after the fault
            checked.jsonl     the events and rows that were checked
            home/, node.log   the node's files
        a/, a.log, ...      homes and logs at the end of the run
        left-out.txt        files that were not copied, with the reason

A record is written at once, because the node continues and its files change. A line matches if it contains a value that
the violation's text names. Such values are the first 12 digits of a group's id, steps, numbers, versions and pids.
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
from tests.chaos.machine import Load, Meter
from tests.chaos.observation.copies import MIB, Copier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from tests.chaos.invariants.checks import Violation
    from tests.chaos.observation.watch import Observation
    from tests.chaos.schedule import Planned
    from tests.chaos.swarm import SwarmNode

MAX_COPIED_RECORDS = 6  # later records have the report only, because they often repeat the same violation
MAX_RECORD_BYTES = 24 * MIB
MAX_CHECKED = 20_000  # events, and rows
MAX_KEPT_RUNS = 10
LAST_FAULTS = 4
REPORT = "report.txt"
GROUP = re.compile(r"\b[0-9a-f]{12}\b")
NUMBERED = re.compile(r"\b(steps?|numbers?|versions?|own groups?|pid)\b[^0-9]{0,12}(\d+)(?:(?: to |, )(\d+))?")
FIELDS = {"step": ("step",), "number": ("number",), "own group": ("number",), "version": ("version", "policy_version")}
MAX_LINES = 60  # of one violation
MAX_LINES_OF_A_VALUE = 12
LAST_LINES = 8  # of event log and log, also without a match
MAX_LINE_LENGTH = 400


class Evidence:
    """The evidence of one run that works in `folder`. Several threads may use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_records = 0
        self._timeline: list[dict[str, Any]] = []
        self._writing = threading.RLock()
        self._meter = Meter()
        self._copied = Copier()
        (folder / "violations").mkdir(parents=True, exist_ok=True)

    def log(self, text: str) -> None:
        """Add a line to `run.log`."""
        with self._writing, (self.folder / "run.log").open("a") as log:
            log.write(f"{text}\n")

    def note(self, moment: str, planned: Planned, *, notes: Sequence[str] = (), load: Load | None = None) -> None:
        """Add a moment of a fault to the timeline: "begins", "injected" or "checked"."""
        entry: dict[str, Any] = {"at": round(time.time(), 3), "run_s": round(self._meter.read().seconds, 1)}
        entry |= {"node": planned.node, "number": planned.number, "fault": planned.fault, "moment": moment}
        entry |= {"notes": list(notes)} if notes else {}
        entry |= {"machine": str(load)} if load else {}
        with self._writing:
            self._timeline.append(entry)
            with (self.folder / "timeline.jsonl").open("a") as timeline:
                timeline.write(json.dumps(entry) + "\n")

    def record(
        self,
        node: SwarmNode,
        found: Sequence[Violation],
        *,
        seen: Sequence[Observation],
        load: Load | None = None,
    ) -> None:
        """Write a record of these violations and copy the node's files; do nothing without a violation.

        `seen`: the observations, that before the fault first and the current one last.
        """
        if not found:
            return
        with self._writing:
            self.num_records += 1
            folder = self.folder / "violations" / f"{self.num_records:03}-{node.name}"
            folder.mkdir()
            (folder / REPORT).write_text(self._report(node, found, load or self._meter.read()))
            _write_seen(folder, seen)
            if self.num_records <= MAX_COPIED_RECORDS:
                copier = Copier(MAX_RECORD_BYTES)
                copier.copy(node.process.log, folder / "node.log")
                copier.copy(node.home, folder / "home")
                self._copied.left_out += [f"{folder.name}: {one}" for one in copier.left_out]

    def _report(self, node: SwarmNode, found: Sequence[Violation], load: Load) -> str:
        before = [entry for entry in self._timeline if entry["node"] == node.name]
        others = {entry["node"]: entry for entry in self._timeline if entry["node"] != node.name}
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        lines = [f"time: {now}, {self._meter.read().seconds:.0f} s after the start of the run"]
        lines += [f"machine: {load}", f"node: {node.name} ({node.role}), home {node.home}"]
        lines += ["last faults of the node:", *(f"    {json.dumps(entry)}" for entry in before[-3 * LAST_FAULTS :])]
        lines += ["last fault of each other node:", *(f"    {json.dumps(entry)}" for entry in others.values())]
        for violation in found:
            lines += ["", f"VIOLATION {violation}", f"    fault: {violation.fault or 'none, at the end of the run'}"]
            matching = matching_lines(violation.figures, event_log=Home(node.home).events, log=node.process.log)
            lines += [f"    {line}" for line in matching]
        return "\n".join(lines) + "\n"

    def keep(self, to: Path) -> list[str]:
        """Copy the evidence to `to`, a new folder, and return lines that report it. All nodes must be stopped."""
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


def remove_oldest(folder: Path) -> list[str]:
    """Remove the oldest kept runs in `folder` to make space for one more, and return lines that report it."""
    kept = [path for path in folder.glob("*-*") if (path / "left-out.txt").exists()]
    oldest = sorted(kept, key=lambda path: path.stat().st_mtime)[: max(0, len(kept) - MAX_KEPT_RUNS + 1)]
    for path in oldest:
        shutil.rmtree(path)
    return [f"removed {path}: at most {MAX_KEPT_RUNS} runs are kept" for path in oldest]


def _write_seen(folder: Path, seen: Sequence[Observation]) -> None:
    """Write the observations without events and rows, and the events and rows of the last one."""
    observations = [dataclasses.replace(one, events=(), buffer=None) for one in seen]
    (folder / "seen.json").write_text(json.dumps([_plain(one) for one in observations], indent=1))
    if not seen:
        return
    last = seen[-1]
    rows = last.buffer.rows if last.buffer else ()
    with (folder / "checked.jsonl").open("w") as file:
        for event in last.events[-MAX_CHECKED:]:
            file.write(json.dumps({"time": event.time, "event": event.name, **event.fields}) + "\n")
        for row in rows[-MAX_CHECKED:]:
            file.write(json.dumps({"row": dataclasses.asdict(row)}) + "\n")


def _plain(value: Any) -> Any:
    """Return the value in types of JSON: dataclasses as objects, keys as strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def matching_lines(figures: str, *, event_log: Path, log: Path) -> list[str]:
    """Return the lines that match a violation's text, as `events.jsonl:812: {...}`, then the newest lines of both."""
    events = [line for file in event_log_files(event_log) for line in _numbered(file)]
    log_lines = _numbered(log)
    found = [line for condition in _conditions(figures) for line in _first_and_last(_events_with(condition, events))]
    for term in _terms(figures):
        found += _first_and_last(line for line in log_lines if term in line[1])
    shown = dict.fromkeys([*found[:MAX_LINES], *events[-LAST_LINES:], *log_lines[-LAST_LINES:]])
    return [f"{place}: {text[:MAX_LINE_LENGTH]}" for place, text in shown]


def _conditions(figures: str) -> Iterator[Callable[[dict[str, Any]], bool]]:
    """Yield a condition on an event for each value in a violation's text."""
    for group in GROUP.findall(figures):
        yield lambda event, group=group: str(event.get("group", "")).startswith(group)
    for kind, first, last in NUMBERED.findall(figures):
        names = FIELDS.get(kind.removesuffix("s"), ())
        values = {int(first), int(last or first)}
        yield lambda event, names=names, values=values: any(event.get(name) in values for name in names)


def _terms(figures: str) -> list[str]:
    """Return the strings to search in a log."""
    pids = [first for kind, first, _ in NUMBERED.findall(figures) if kind == "pid"]
    return [*GROUP.findall(figures), *(f"pid {pid}" for pid in pids)]


def _events_with(
    condition: Callable[[dict[str, Any]], bool], events: Iterable[tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    for place, text in events:
        try:
            event = json.loads(text)
        except ValueError:
            continue  # a fault damaged this line
        if isinstance(event, dict) and condition(event):
            yield place, text


def _first_and_last(lines: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the first and last lines, at most `MAX_LINES_OF_A_VALUE`."""
    found = list(lines)
    half = MAX_LINES_OF_A_VALUE // 2
    return found if len(found) <= MAX_LINES_OF_A_VALUE else [*found[:half], *found[-half:]]


def _numbered(file: Path) -> list[tuple[str, str]]:
    """Return the lines of a file with name and number; nothing if the file does not exist."""
    try:
        text = file.read_text(errors="replace")
    except FileNotFoundError:
        return []
    return [(f"{file.name}:{number}", line) for number, line in enumerate(text.splitlines(), start=1)]
