"""Time until the first answer of a command: whole processes, from their start to their end or their first frame.

`help_s`: `ftis-node --help`. `status_s`: `ftis-node status` on a stopped node's home. `completion_s`: one press of TAB.
`dashboard_first_paint_s`: `ftis-node dashboard` on the same home in a terminal of 80 x 24, until it has been sent about
all of its cells. `python_s`: the interpreter alone, which is in each of them.

The values are medians over `--runs`. If other programs use the machine, use `*_cpu_s`, the median of the process' user
and system time. The command itself needs that time, while wall time is shared.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from fcntl import ioctl
from pathlib import Path
from typing import NamedTuple

COLUMNS, ROWS = 80, 24
PAINT_LIMIT_S = 60.0
ESCAPES = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|P[^\x1b]*\x1b\\|[@-_=>])")
COMMAND = (sys.executable, "-m", "ftis_node")


class Taken(NamedTuple):
    """Wall time and processor time in seconds."""

    wall_s: float
    cpu_s: float


def whole_process(*command: str, **environment: str) -> Taken:
    """Run a command from start to end, and return its times. Raises CalledProcessError if it fails."""
    started_at = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | environment)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started_at
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Taken(wall_s, usage.ru_utime + usage.ru_stime)


def first_paint(*command: str) -> Taken | None:
    """Run a command in a terminal until about all cells are sent. Return its times, or None if it ends before."""
    started_at = time.perf_counter()
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(command[0], command)
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    try:
        painted = _wait_for_frame(terminal, deadline=started_at + PAINT_LIMIT_S)
        wall_s = time.perf_counter() - started_at
    finally:
        os.kill(pid, signal.SIGKILL)
        _, _, usage = os.wait4(pid, 0)
        os.close(terminal)
    return Taken(wall_s, usage.ru_utime + usage.ru_stime) if painted else None


def _wait_for_frame(terminal: int, *, deadline: float) -> bool:
    sent = b""
    while (left_s := deadline - time.perf_counter()) > 0:
        if not select.select([terminal], [], [], left_s)[0]:
            return False
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the other end is closed, because the program has ended
            return False
        sent += piece
        if len(ESCAPES.sub(b"", sent).decode(errors="ignore")) >= COLUMNS * (ROWS - 1):
            return True
    return False


def stopped_home(root: Path) -> str:
    """Return a home of a stopped node, with the files that these commands read."""
    from ftis_node.telemetry.status import Status

    (root / "status.json").write_bytes(Status().to_json())
    return str(root)


def medians(name: str, runs: list[Taken | None]) -> dict[str, float | None]:
    """Return `<name>_s` and `<name>_cpu_s`, rounded to milliseconds, or None if no run succeeded."""
    done = [run for run in runs if run is not None]
    wall_s = round(statistics.median(run.wall_s for run in done), 3) if done else None
    cpu_s = round(statistics.median(run.cpu_s for run in done), 3) if done else None
    return {f"{name}_s": wall_s, f"{name}_cpu_s": cpu_s}


def main() -> None:
    """Print a line for each command, and all figures as JSON in the last one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9, help="runs of each command (default: 9)")
    num_runs = parser.parse_args().runs
    os.environ.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # installed programs have compiled files, and these have them from the second run
    completion = {"COMP_WORDS": "ftis-node join --role ", "COMP_CWORD": "3", "_FTIS_NODE_COMPLETE": "complete_bash"}
    with tempfile.TemporaryDirectory() as folder:
        home = stopped_home(Path(folder))
        benches = {
            "python": lambda: whole_process(sys.executable, "-c", "pass"),
            "help": lambda: whole_process(*COMMAND, "--help"),
            "status": lambda: whole_process(*COMMAND, "status", "--home", home),
            "completion": lambda: whole_process(*COMMAND, **completion),
            "dashboard_first_paint": lambda: first_paint(*COMMAND, "dashboard", "--home", home),
        }
        figures: dict[str, float | None] = {}
        for name, run in benches.items():
            run()  # the first run reads files that are cached in memory later
            figures |= medians(name, [run() for _ in range(num_runs)])
            sys.stdout.write(f"{name:22} {figures[f'{name}_s']} s, {figures[f'{name}_cpu_s']} s of processors\n")
    sys.stdout.write(json.dumps({"runs": num_runs, "cores": os.cpu_count()} | figures) + "\n")


if __name__ == "__main__":
    main()
