"""Repair of an event trail with damaged lines: they are left out, and the original file is kept.

Bytes that a disk corrupted, or zeros after a power cut, must not keep a node from starting. The file is not discarded
either. A half-written last line is no damage: `events.py` removes it.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from ftis_node.config.disk_room import replace_file
from ftis_node.telemetry.events import event_log_files
from ftis_node.telemetry.history import event_name

if TYPE_CHECKING:
    from pathlib import Path


def repair_event_log(path: Path, damaged: Path) -> int:
    """Remove the lines that are no events, also in rotated files; return their number. Raise OSError."""
    return sum(_repair(file, damaged) for file in event_log_files(path))


def _repair(file: Path, damaged: Path) -> int:
    with file.open("rb") as lines:
        num_damaged = sum(line.endswith(b"\n") and event_name(line) is None for line in lines)
    if num_damaged:
        damaged.mkdir(exist_ok=True)
        shutil.copy2(file, damaged / file.name)
        with file.open("rb") as lines:
            replace_file(file, b"".join(line for line in lines if line.endswith(b"\n") and event_name(line)))
    return num_damaged
