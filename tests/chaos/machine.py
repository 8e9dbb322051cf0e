"""The load of the machine over a period. It shows whether other processes caused a missed time limit."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

import psutil

from tests.chaos.power.cut import stolen_seconds


def busy_seconds() -> float:
    """Return the processor time of all processes since boot, in seconds per core."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system) / (psutil.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Load:
    """The load average of the last minute, and the busy and stolen shares (0 to 1) of processor time over `seconds`.

    Stolen time is time that the host of a virtual machine gave to others.
    """

    average: float
    busy: float
    stolen: float
    seconds: float

    def __str__(self) -> str:
        cores = psutil.cpu_count() or 1
        return (
            f"load {self.average:.1f} on {cores} cores, {self.busy:.0%} busy and {self.stolen:.0%} stolen"
            f" over {self.seconds:.0f} s"
        )


@dataclass(frozen=True, slots=True)
class Meter:
    """A measurement of the load that begins with its creation."""

    began_at: float = field(default_factory=time.monotonic)  # by the monotonic clock
    _busy_s: float = field(default_factory=busy_seconds)
    _stolen_s: float = field(default_factory=stolen_seconds)

    def read(self) -> Load:
        """Return the load from the beginning until now."""
        seconds = max(time.monotonic() - self.began_at, 1e-3)
        busy, stolen = (busy_seconds() - self._busy_s) / seconds, (stolen_seconds() - self._stolen_s) / seconds
        return Load(os.getloadavg()[0], min(1.0, busy), min(1.0, stolen), seconds)
