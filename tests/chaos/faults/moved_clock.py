"""Starts `ftis-node` with a wall clock that can be moved while it runs; the product knows nothing of it.

    python tests/chaos/faults/moved_clock.py OFFSET_FILE python -m ftis_node join ...

The offset in seconds is read from the file, which may change at any time or be missing (0). What reads the wall clock
is replaced before anything of the node is imported: `time.time`, `time.time_ns`, and through them the directory's time.
`time.monotonic` is left alone, as a machine leaves it whose clock is set. The node's workers keep the machine's clock.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_S = 0.1
NUM_OWN_ARGUMENTS = 5  # this file, the offset's, and `python -m ftis_node`


def prefix(offset_file: Path) -> tuple[str, ...]:
    """What stands before a node's command so that its clock can be moved."""
    return (sys.executable, str(Path(__file__).absolute()), str(offset_file))


def offset_file_of(home: Path) -> Path:
    """Where the offset of the node with this home stands, beside it."""
    return home.with_suffix(".clock")


def follow(offset_file: Path) -> None:
    """Replaces the wall clock's functions."""
    real, offset = time.time, _offset_reader(offset_file)
    time.time = lambda: real() + offset()
    time.time_ns = lambda: int(time.time() * 1e9)


def _offset_reader(offset_file: Path) -> Callable[[], float]:
    """The offset in the file, looked up ten times a second at most."""
    known_s, looked_at = 0.0, -LOOK_S

    def offset_s() -> float:
        nonlocal known_s, looked_at
        if (now := time.monotonic()) - looked_at >= LOOK_S:
            looked_at = now
            try:
                known_s = float(offset_file.read_text() or 0)
            except FileNotFoundError:
                known_s = 0.0
        return known_s

    return offset_s


if __name__ == "__main__":
    follow(Path(sys.argv[1]))
    sys.path[0] = str(Path.cwd())  # as `python -m` has it
    sys.argv = [sys.argv[0], *sys.argv[NUM_OWN_ARGUMENTS:]]
    runpy.run_module("ftis_node", run_name="__main__", alter_sys=True)
