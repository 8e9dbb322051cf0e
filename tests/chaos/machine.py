"""The load of the machine over a period. It shows whether other processes caused a missed time limit."""

from __future__ import annotations

import os
import time

import psutil

from tests.chaos.power.cut import stolen_seconds


def busy_seconds() -> float:
    """Return the processor time of all processes since boot, in seconds per core."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system) / (psutil.cpu_count() or 1)


class Meter:
    """A measurement of the load that begins with its creation."""

    def __init__(self) -> None:
        self.began_at = time.monotonic()
        self._busy_s, self._stolen_s = busy_seconds(), stolen_seconds()

    def read(self) -> str:
        """Return the load average, and the busy share and the share that the host took since the beginning."""
        seconds = max(time.monotonic() - self.began_at, 1e-3)
        busy, stolen = (busy_seconds() - self._busy_s) / seconds, (stolen_seconds() - self._stolen_s) / seconds
        return (
            f"load {os.getloadavg()[0]:.1f} on {psutil.cpu_count() or 1} cores, {min(1.0, busy):.0%} busy and"
            f" {min(1.0, stolen):.0%} stolen over {seconds:.0f} s"
        )
