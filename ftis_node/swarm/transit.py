"""Weight versions in transit to one generator: tracks arrivals, and decides which versions to fetch.

Versions may overtake each other. A generator serves the newest version that has arrived. It goes back only with a
learner that has lost steps. Time is a number in the unit of the delay: seconds by a node's clock, or optimizer steps in
an experiment.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from ftis_node.config.roles import Delay

NUM_NEWEST, LEASE_S = 2, 60.0  # of the versions that a learner keeps for generators


@dataclass(slots=True)
class VersionsInTransit:
    """Delay queue of weight versions; the delay of each is drawn when it is sent."""

    delay: Delay
    source: random.Random
    served: int = 0
    _arrivals: dict[int, float] = field(default_factory=dict)

    @property
    def versions(self) -> Sequence[int]:
        return sorted(self._arrivals)

    def send(self, version: int, *, at: float) -> None:
        self._arrivals[version] = at + self.delay.draw(self.source)

    def go_back(self, version: int) -> list[int]:
        """Drop and return the versions in transit from `version` on, because the learner lost them and repeats them."""
        lost = [held for held in self._arrivals if held >= version]
        for held in lost:
            del self._arrivals[held]
        self.served = min(self.served, version - 1)
        return lost

    def receive(self, now: float) -> int | None:
        """Return the version to serve from now on, None if nothing newer has arrived. Older ones are dropped."""
        arrived = [version for version, at in self._arrivals.items() if at <= now and version > self.served]
        if not arrived:
            return None
        self.served = max(arrived)
        self._arrivals = {version: at for version, at in self._arrivals.items() if version > self.served}
        return self.served


def should_fetch(delay: Delay, *, num_held: int, max_held: int, since_last: float) -> bool:
    """Return whether a generator that can hold `max_held` versions in transit should fetch one more.

    `since_last` is the time since the previous fetched version was made. The fetches are spread over the delay. If the
    generator fetched each new version, versions of nearly the same age would occupy all places. Then none would arrive
    for the rest of the delay.
    """
    return num_held < max_held and since_last >= delay.most / max_held


def outdated_offers(requested_at: dict[int, float], *, now: float, max_offered: int) -> list[int]:
    """Return the versions that a learner no longer has to keep for generators.

    The `NUM_NEWEST` newest stay. Older ones stay during a fetch (last request within `LEASE_S`), but never more than
    `max_offered` in all. `requested_at` maps each kept version to the time of its last request.
    """
    versions = sorted(requested_at, reverse=True)
    older = versions[NUM_NEWEST:]
    leased = [version for version in older if now - requested_at[version] <= LEASE_S][: max_offered - NUM_NEWEST]
    return [version for version in older if version not in leased]
