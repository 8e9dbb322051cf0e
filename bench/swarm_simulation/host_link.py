"""Network link of a host, and the bytes in and out of it by what they are for."""

from __future__ import annotations

import math
from enum import IntEnum
from random import Random

from swarm_simulation.settings import SimulationSettings

LATENCY_SPREAD = 0.6  # sigma of its logarithm


class Kind(IntEnum):
    """What bytes are for."""

    ANNOUNCEMENTS = 0
    BODIES = 1
    QUESTIONS = 2
    CONFIRMATIONS = 3
    DIRECTORY = 4


class ByteCounts:
    """Bytes sent and received by kind, since the last reset."""

    __slots__ = ("received", "sent")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.received = [0.0] * len(Kind)
        self.sent = [0.0] * len(Kind)


class HostLink:
    """FIFO model of a link: a transfer starts when the link is free. Latency is that to the backbone."""

    __slots__ = ("_down_free_at", "_up_free_at", "down_bytes_per_s", "latency_s", "up_bytes_per_s")

    def __init__(self, settings: SimulationSettings, random: Random) -> None:
        slow = random.random() < settings.slow_share
        low, high = settings.slow_up_bytes_per_s if slow else settings.fast_up_bytes_per_s
        self.up_bytes_per_s = math.exp(random.uniform(math.log(low), math.log(high)))
        self.down_bytes_per_s = settings.down_by_up * self.up_bytes_per_s
        self.latency_s = random.lognormvariate(math.log(settings.latency_s), LATENCY_SPREAD)
        self._up_free_at = 0.0
        self._down_free_at = 0.0

    def transfer(self, other: HostLink, num_bytes: float, *, now: float) -> float:
        """Return the seconds until data sent from this host has arrived at the other."""
        self._up_free_at = max(now, self._up_free_at) + num_bytes / self.up_bytes_per_s
        other._down_free_at = max(now, other._down_free_at) + num_bytes / other.down_bytes_per_s
        return max(self._up_free_at, other._down_free_at) - now + self.latency_s + other.latency_s
