"""Power cuts: when to cut, and how to end everything of a node at one instant.

start-up     uniform over the time that the last start took
uniform      uniform over a life of so many seconds
checkpoint   while a checkpoint is written: a moment after its temporary folder appeared
commit       a moment after the database's journal moved
"""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.node.support import RunningNode

KINDS = ("uniform", "start-up", "checkpoint", "commit")
LONGEST_MORE_S = {"checkpoint": 0.03, "commit": 0.004}
LOOK_S = 0.0005
PATIENCE_S = 20.0  # for a checkpoint or a commit to begin; then it is cut anyhow
GONE_S = 20.0


@dataclass(frozen=True, slots=True)
class Cut:
    """`after` is a share of the last start's time for `start-up`, else of a life: it counts from when work began.

    `more_s` is what passes from the awaited sight to the cut.
    """

    kind: str
    after: float
    more_s: float


def plan_cuts(num_cuts: int, *, seed: int) -> list[Cut]:
    """All kinds come round, in an order of the seed's."""
    chance = random.Random(seed)
    kinds = [KINDS[index % len(KINDS)] for index in range(num_cuts)]
    chance.shuffle(kinds)
    return [Cut(kind, chance.random(), chance.uniform(0, LONGEST_MORE_S.get(kind, 0.0))) for kind in kinds]


def await_sight(kind: str, home: Path) -> bool:
    """Returns when what the kind waits for begins; False where it did not within `PATIENCE_S`."""
    sights: dict[str, Callable[[], object]] = {
        "checkpoint": lambda: any((home / "checkpoints").glob(".step-*")),
        "commit": lambda: (home / "replay.sqlite-wal").stat().st_mtime_ns,
    }
    if (sight := sights.get(kind)) is None:
        return True
    before, deadline = (0 if kind == "checkpoint" else sight()), time.monotonic() + PATIENCE_S
    while sight() == before:
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True


def cut_power(node: RunningNode) -> int:
    """Ends the node and all that it started, at one instant: all are stopped before the first is killed.

    Returns how many there were. Fails where one is left.
    """
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


def cpu_seconds(node: RunningNode) -> float:
    """What a node and all that it started have had of the processors."""
    times = [process.cpu_times() for process in _family(node)]
    return sum(each.user + each.system for each in times)


def stolen_seconds() -> float:
    """What the host of a virtual machine has given to others since the machine began, a core (Linux; elsewhere 0)."""
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
