"""Starts `ftis-node` with a wall clock that can be moved while it runs, without any support in the package.

    python tests/chaos/faults/moved_clock.py OFFSET_FILE python -m ftis_node join ...

The file contains the offset in seconds. It may change at any time; a missing file means 0. `time.time` and
`time.time_ns` are replaced before the package is imported. `time.monotonic` does not change, as on a real machine. The
workers of the node keep the machine's clock.
"""

import runpy
import sys
import time
from pathlib import Path

POLL_S = 0.1
NUM_OWN_ARGUMENTS = 5  # this file, the offset file, and `python -m ftis_node`


def prefix(offset_file: Path) -> tuple[str, ...]:
    return (sys.executable, str(Path(__file__).absolute()), str(offset_file))


def offset_file_of(home: Path) -> Path:
    """Return the offset file of a home, which is beside the home."""
    return home.with_suffix(".clock")


def follow(offset_file: Path) -> None:
    """Replace the functions of the wall clock. The file is read at most ten times per second."""
    real, known_s, read_at = time.time, 0.0, -POLL_S

    def moved() -> float:
        nonlocal known_s, read_at
        if (now := time.monotonic()) - read_at >= POLL_S:
            read_at = now
            known_s = float(offset_file.read_text() or 0) if offset_file.exists() else 0.0
        return real() + known_s

    time.time, time.time_ns = moved, lambda: int(moved() * 1e9)


if __name__ == "__main__":
    follow(Path(sys.argv[1]))
    sys.path[0] = str(Path.cwd())  # as `python -m` sets it
    sys.argv = [sys.argv[0], *sys.argv[NUM_OWN_ARGUMENTS:]]
    runpy.run_module("ftis_node", run_name="__main__", alter_sys=True)
