"""Processes with a share of a core: they are stopped and continued by signals, in short turns.

A cgroup's quota (`cpu.max`) does the same in the kernel, but needs root. Weights by nice give no share: each worker is
a separate session, and with autogroups the kernel divides a core among sessions first. A quota counts only running
time. Turns also pass while the processes wait, so the share is one of wall time.
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence

TURN_S = 0.1  # runs and is stopped once in this time; a cgroup's usual period


class Slowed:
    """Processes with their descendants that run 1/`factor` of the time, all in the same turns.

    Between calls it runs; later stops make up for that, and are shorter after one that took too long.
    """

    def __init__(self, pids: Sequence[int], factor: float) -> None:
        """Counts from now on. Raises psutil.NoSuchProcess."""
        self._roots = [psutil.Process(pid) for pid in pids]
        self._factor = factor
        self._runs_since = time.monotonic()
        self._ran_s = self._stopped_s = 0.0

    @property
    def speed(self) -> float:
        """The share of the time that they ran, 1 before the first turn."""
        return self._ran_s / (self._ran_s + self._stopped_s) if self._ran_s else 1.0

    def take_turns(self, seconds: float) -> None:
        """For about so long. Descendants that begin meanwhile are slowed by the next call."""
        until = time.monotonic() + seconds
        family = list(self._roots)
        for root in self._roots:
            with suppress(psutil.NoSuchProcess):
                family += root.children(recursive=True)
        while time.monotonic() < until:
            self._take_turn(family)

    def _take_turn(self, family: list[psutil.Process]) -> None:
        """Lets them run, then stops them until the share is right again; they run afterwards whatever happens."""
        time.sleep(max(0.0, self._runs_since + TURN_S / self._factor - time.monotonic()))
        try:
            _send(family, signal.SIGSTOP)
            stopped_at = time.monotonic()
            self._ran_s += stopped_at - self._runs_since
            time.sleep(max(0.0, self._ran_s * (self._factor - 1) - self._stopped_s))
        finally:
            _send(family, signal.SIGCONT)
        self._runs_since = time.monotonic()
        self._stopped_s += self._runs_since - stopped_at


def _send(processes: list[psutil.Process], number: signal.Signals) -> None:
    """To those that are still there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
