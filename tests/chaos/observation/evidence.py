"""The files that are kept of a run with a violation, to find its cause later.

    chaos-out/SEED-TIME/
        run.log             the printed lines
        timeline.jsonl      when each fault began, was injected and was checked, with node and load
        violations/001-a/   a record of each observation with a violation, written at once because the node continues:
            report.txt        the violations, the load, and the observations before and after
            home/, node.log   the node's files
        a/, a.log, ...      homes and logs at the end of the run

Secrets, sockets and large weights are not copied.
"""

from __future__ import annotations

import json
import pprint
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tests.chaos.invariants.checks import Violation
from tests.chaos.observation.watch import Observation
from tests.chaos.schedule import Planned
from tests.chaos.swarm import SwarmNode

MAX_COPIED_RECORDS = 6  # later records have the report only, because they often repeat the same violation
MAX_KEPT_RUNS = 10
MAX_WEIGHTS_BYTES = 1 << 20
WEIGHTS = frozenset({".safetensors", ".part", ".bin", ".pt"})
SECRETS = frozenset({"identity.key", "control.token", "observe.token"})
REPORT = "report.txt"
BUSY_S = 20.0


class Evidence:
    """The evidence of one run that works in `folder`. Several threads may use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_records = 0
        self._writing = threading.RLock()
        (folder / "violations").mkdir(parents=True, exist_ok=True)

    def log(self, text: str) -> None:
        """Add a line to `run.log`."""
        self._append("run.log", text)

    def note(self, moment: str, planned: Planned, *, notes: Sequence[str] = (), load: str = "") -> None:
        """Add a moment of a fault to the timeline: "begins", "injected" or "checked"."""
        entry = {"at": round(time.time(), 3), "node": planned.node, "number": planned.number, "fault": planned.fault}
        self._append("timeline.jsonl", json.dumps({**entry, "moment": moment, "notes": list(notes), "machine": load}))

    def record(
        self, node: SwarmNode, found: Sequence[Violation], *, seen: Sequence[Observation], load: str = ""
    ) -> None:
        """Write a record of these violations and copy the node's files; do nothing without a violation."""
        if not found:
            return
        with self._writing:
            self.num_records += 1
            folder = self.folder / "violations" / f"{self.num_records:03}-{node.name}"
            folder.mkdir()
            lines = [f"VIOLATION {one}" for one in found]
            lines += [
                f"node {node.name} ({node.role}), {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}, {load}"
            ]
            lines += [pprint.pformat(replace(one, events=(), buffer=None), width=120) for one in seen]
            (folder / REPORT).write_text("\n".join(lines) + "\n")
            if self.num_records <= MAX_COPIED_RECORDS:
                shutil.copyfile(node.process.log, folder / "node.log")
                copy_home(node.home, folder / "home")

    def keep(self, to: Path) -> list[str]:
        """Copy the evidence to `to`, a new folder, and return lines that report it. All nodes must be stopped."""
        to.mkdir(parents=True)
        with self._writing:
            for file in self.folder.iterdir():
                if file.suffix in (".log", ".jsonl", ".toml"):
                    shutil.copyfile(file, to / file.name)
            shutil.copytree(self.folder / "violations", to / "violations")
            for log in sorted(self.folder.glob("*.log")):
                if (home := log.with_suffix("")).is_dir():
                    copy_home(home, to / home.name)
        return [f"kept in {to}", *(f"  {path.relative_to(to)}" for path in sorted(to.glob(f"violations/*/{REPORT}")))]

    def _append(self, name: str, line: str) -> None:
        with self._writing, (self.folder / name).open("a") as file:
            file.write(f"{line}\n")


def copy_home(home: Path, to: Path) -> None:
    """Copy a home while its node may write, each database as one transaction. Files that disappear are skipped."""
    for file in sorted(home.rglob("*")):
        target = to / file.relative_to(home)
        try:
            if not _is_wanted(file):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix != ".sqlite" or not _copy_database(file, target):
                shutil.copyfile(file, target)
        except FileNotFoundError:
            continue


def _is_wanted(file: Path) -> bool:
    status = file.lstat()
    is_large = file.suffix in WEIGHTS and status.st_size > MAX_WEIGHTS_BYTES
    return stat.S_ISREG(status.st_mode) and file.name not in SECRETS and not is_large


def _copy_database(file: Path, target: Path) -> bool:
    """Copy a database with the content of its write-ahead log; return False if it is damaged."""
    try:
        with (
            closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)) as source,
            closing(sqlite3.connect(target)) as copy,
        ):
            source.backup(copy)
    except sqlite3.Error:
        target.unlink(missing_ok=True)
        return False
    return True


def remove_oldest(folder: Path) -> list[str]:
    """Remove the oldest kept runs in `folder` to make space for one more, and return lines that report it."""
    kept = sorted(folder.glob("*-*/run.log"), key=lambda path: path.stat().st_mtime)
    oldest = [log.parent for log in kept[: max(0, len(kept) - MAX_KEPT_RUNS + 1)]]
    for path in oldest:
        shutil.rmtree(path)
    return [f"removed {path}: at most {MAX_KEPT_RUNS} runs are kept" for path in oldest]
