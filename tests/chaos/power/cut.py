"""Power cuts: the time of a cut, and how all processes of a node end at one instant.

| kind | time of the cut |
|---|---|
| start-up | uniform over the duration of the last start |
| uniform | uniform over some seconds of work |
| checkpoint | shortly after the temporary folder of a checkpoint appeared |
| commit | shortly after the write-ahead log changed |
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.node.support import RunningNode

KINDS = ("uniform", "start-up", "checkpoint", "commit")
LONGEST_DELAY_S = {"checkpoint": 0.03, "commit": 0.004}
POLL_S = 0.0005
EVENT_WITHIN_S = 20.0  # if no checkpoint or commit begins, the cut comes without it
GONE_S = 20.0


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut. `after` is a fraction (0 to 1) of the last start for `start-up`, else of the working time.

    `delay_s` is the time from the awaited event to the cut.
    """

    kind: str
    after: float
    delay_s: float


def plan_cuts(num_cuts: int, *, seed: int) -> list[Cut]:
    """Return cuts of all kinds in equal numbers, in an order that the seed determines."""
    rng = random.Random(seed)
    kinds = [KINDS[index % len(KINDS)] for index in range(num_cuts)]
    rng.shuffle(kinds)
    return [Cut(kind, rng.random(), rng.uniform(0, LONGEST_DELAY_S.get(kind, 0.0))) for kind in kinds]


def wait_for_event(kind: str, home: Path) -> bool:
    """Wait for the event of this kind; return False if it did not begin within `EVENT_WITHIN_S`."""
    events: dict[str, Callable[[], object]] = {
        "checkpoint": lambda: any((home / "checkpoints").glob(".step-*")),
        "commit": lambda: (home / "replay.sqlite-wal").stat().st_mtime_ns,
    }
    if (event := events.get(kind)) is None:
        return True
    before, deadline = (0 if kind == "checkpoint" else event()), time.monotonic() + EVENT_WITHIN_S
    while event() == before:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def cut_power(node: RunningNode) -> int:
    """Stop all processes of the node, then kill them, and return their number. Fails if one remains."""
    frozen: dict[int, psutil.Process] = {}
    while fresh := [process for process in _family(node) if process.pid not in frozen]:
        for process in fresh:
            frozen[process.pid] = process
            _send(process, signal.SIGSTOP)
    for process in frozen.values():
        _send(process, signal.SIGKILL)
    node.process.wait()
    _, alive = psutil.wait_procs(list(frozen.values()), timeout=GONE_S)
    assert not alive, f"left running: {alive}"
    return len(frozen)


def stolen_seconds() -> float:
    """Return the stolen time of a virtual machine since boot, in seconds per core; 0 on other systems than Linux."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0)) / (psutil.cpu_count() or 1)


def _family(node: RunningNode) -> list[psutil.Process]:
    try:
        return node.processes()
    except psutil.NoSuchProcess:
        return []


def _send(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass
