"""Processes with a share of a core: they are stopped and continued by signals, in short turns.

A cgroup's quota (`cpu.max`) does the same in the kernel, but needs root. Weights by nice give no share: each worker is
a separate session, and with autogroups the kernel divides a core among sessions first. A quota counts only running
time. Turns also pass while the processes wait, so the share is one of wall time.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

TURN_S = 0.1  # one turn of running and stopping; the usual period of a cgroup


class Slowed:
    """Processes with their descendants that run 1/`factor` of the time, all in the same turns.

    Between calls it runs; later stops make up for that, and are shorter after one that took too long.
    """

    def __init__(self, pids: Sequence[int], factor: float) -> None:
        """Start the count. Raises psutil.NoSuchProcess."""
        self._roots = [psutil.Process(pid) for pid in pids]
        self._factor = factor
        self._runs_since = time.monotonic()
        self._ran_s = self._stopped_s = 0.0

    @property
    def speed(self) -> float:
        """Return the share of time in which they ran, 1 before the first turn."""
        return self._ran_s / (self._ran_s + self._stopped_s) if self._ran_s else 1.0

    def take_turns(self, seconds: float) -> None:
        """Slow the processes for about this time. Descendants that start meanwhile are slowed by the next call."""
        until = time.monotonic() + seconds
        family = list(self._roots)
        for root in self._roots:
            with suppress(psutil.NoSuchProcess):
                family += root.children(recursive=True)
        while time.monotonic() < until:
            self._take_turn(family)

    def _take_turn(self, family: list[psutil.Process]) -> None:
        """Let them run, then stop them until the share is right. They run afterwards, also after an error."""
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
    """Send a signal to the processes that still exist."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
