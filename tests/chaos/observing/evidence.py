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

A look is written down at once: a node goes on after a violation, and its files change.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any

from ftis_node.config.home import Home
from tests.chaos.machine import Busy, Meter
from tests.chaos.observing.copies import MIB, Copier
from tests.chaos.observing.shown import lines_that_show

if TYPE_CHECKING:
    from collections.abc import Sequence
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
