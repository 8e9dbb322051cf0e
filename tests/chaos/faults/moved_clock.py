"""Starts `ftis-node` with a wall clock that can be moved while it runs, without any support in the package.

    python tests/chaos/faults/moved_clock.py OFFSET_FILE python -m ftis_node join ...

The file contains the offset in seconds. It may change at any time; a missing file means 0. `time.time` and
`time.time_ns` are replaced before the package is imported. `time.monotonic` does not change, as on a real machine. The
workers of the node keep the machine's clock.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.1
NUM_OWN_ARGUMENTS = 5  # this file, the offset file, and `python -m ftis_node`


def prefix(offset_file: Path) -> tuple[str, ...]:
    """Return the prefix of a node's command that makes its clock movable."""
    return (sys.executable, str(Path(__file__).absolute()), str(offset_file))


def offset_file_of(home: Path) -> Path:
    """Return the offset file of a home, which is beside the home."""
    return home.with_suffix(".clock")


def follow(offset_file: Path) -> None:
    """Replace the functions of the wall clock."""
    real, offset = time.time, _offset_reader(offset_file)
    time.time = lambda: real() + offset()
    time.time_ns = lambda: int(time.time() * 1e9)


def _offset_reader(offset_file: Path) -> Callable[[], float]:
    """Return a function that gives the offset and reads the file at most ten times per second."""
    known_s, read_at = 0.0, -POLL_S

    def offset_s() -> float:
        nonlocal known_s, read_at
        if (now := time.monotonic()) - read_at >= POLL_S:
            read_at = now
            try:
                known_s = float(offset_file.read_text() or 0)
            except FileNotFoundError:
                known_s = 0.0
        return known_s

    return offset_s


if __name__ == "__main__":
    follow(Path(sys.argv[1]))
    sys.path[0] = str(Path.cwd())  # as `python -m` sets it
    sys.argv = [sys.argv[0], *sys.argv[NUM_OWN_ARGUMENTS:]]
    runpy.run_module("ftis_node", run_name="__main__", alter_sys=True)
