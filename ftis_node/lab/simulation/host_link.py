"""A host's line: so many bytes a second each way, one transfer after the other, and its latency to the backbone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from ftis_node.lab.simulation.settings import SimulationSettings

LATENCY_SPREAD = 0.6  # sigma of its logarithm


class HostLink:
    """When what is sent has gone. A transfer takes the line from when it is free."""

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
        """Seconds until what is sent from here has arrived there."""
        self._up_free_at = max(now, self._up_free_at) + num_bytes / self.up_bytes_per_s
        other._down_free_at = max(now, other._down_free_at) + num_bytes / other.down_bytes_per_s
        return max(self._up_free_at, other._down_free_at) - now + self.latency_s + other.latency_s
