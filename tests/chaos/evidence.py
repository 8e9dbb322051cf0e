"""What is kept of a run with a violation: `violations/001-a/` has a report, and the home and log of the node then."""

import pprint
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tests.chaos.invariants.checks import Violation
from tests.chaos.observation.watch import Observation
from tests.chaos.swarm import SwarmNode

MAX_COPIED = 6  # later records have the report only, because they often repeat the same violation
REPORT = "report.txt"
NOT_COPIED = shutil.ignore_patterns("run", "*.safetensors", "*.part", "identity.key", "*.token")


class Evidence:
    """The records of one run that works in `folder`. Several threads may use it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "violations"
        self._writing = threading.Lock()
        self.num_records = 0

    def record(self, node: SwarmNode, found: Sequence[Violation], *, seen: Sequence[Observation]) -> None:
        """Write these violations, the observations before and after, and the node's files at once; it continues."""
        if not found:
            return
        with self._writing:
            self.num_records += 1
            folder = self._folder / f"{self.num_records:03}-{node.name}"
            folder.mkdir(parents=True)
            lines = [f"node {node.name} ({node.role})", *(f"VIOLATION {one}" for one in found)]
            lines += [pprint.pformat(replace(one, events=(), buffer=None), width=120) for one in seen]
            (folder / REPORT).write_text("\n".join(lines) + "\n")
            if self.num_records <= MAX_COPIED:
                shutil.copyfile(node.process.log, folder / "node.log")
                with suppress(shutil.Error):  # files that disappear meanwhile
                    shutil.copytree(node.home, folder / "home", ignore=NOT_COPIED, symlinks=True)
