"""How busy the machine was over a while: whether a limit of time was broken by the node or by its neighbors."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

import psutil

from tests.chaos.power.cut import stolen_seconds


def busy_seconds() -> float:
    """What all processes have had of the processors since the machine began, a core."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system) / (psutil.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Busy:
    """`load`: of the last minute. `busy` and `stolen`: shares of the processors' time, 0 to 1, over `seconds`.

    Stolen is what the host of a virtual machine gave to others.
    """

    load: float
    busy: float
    stolen: float
    seconds: float

    def __str__(self) -> str:
        cores = psutil.cpu_count() or 1
        return (
            f"load {self.load:.1f} on {cores} cores, {self.busy:.0%} busy and {self.stolen:.0%} stolen"
            f" over {self.seconds:.0f} s"
        )


@dataclass(frozen=True, slots=True)
class Meter:
    """Begins to measure when it is made."""

    began_at: float = field(default_factory=time.monotonic)  # by the monotonic clock
    _busy_s: float = field(default_factory=busy_seconds)
    _stolen_s: float = field(default_factory=stolen_seconds)

    def read(self) -> Busy:
        """From the beginning until now."""
        seconds = max(time.monotonic() - self.began_at, 1e-3)
        busy, stolen = (busy_seconds() - self._busy_s) / seconds, (stolen_seconds() - self._stolen_s) / seconds
        return Busy(os.getloadavg()[0], min(1.0, busy), min(1.0, stolen), seconds)
