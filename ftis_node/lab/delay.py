"""How late new weights reach the generators, in virtual time: optimiser steps, not seconds.

HeteroRL (arXiv 2508.17850) trains where learner and samplers lie far apart: a sampler works with weights that are
late by a delay drawn anew for each version, so groups, own and foreign, are sampled by old policies. Versions may
overtake each other on the way; a sampler takes the newest that has arrived and never goes back.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftis_node.errors import UsageError

if TYPE_CHECKING:
    import random

SPEC = re.compile(r"none|fixed:(?P<steps>\d+)|lognormal:(?P<least>\d+)-(?P<most>\d+)")
SIGMAS_INSIDE = 2  # the bounds of a log-normal delay lie so many standard deviations from its median


@dataclass(frozen=True, slots=True)
class Delay:
    """Delays between `least` and `most` steps: log-normal with the bounds' geometric mean as median, cut at both."""

    least: int
    most: int

    def draw(self, source: random.Random) -> int:
        """One delay in steps."""
        if self.least == self.most:
            return self.least
        low, high = math.log(self.least), math.log(self.most)
        drawn = source.lognormvariate((low + high) / 2, (high - low) / (2 * SIGMAS_INSIDE))
        return min(self.most, max(self.least, round(drawn)))


NO_DELAY = Delay(0, 0)


def parse_delay(spec: str) -> Delay:
    """`none`, `fixed:K` or `lognormal:MIN-MAX`. Raises UsageError."""
    match = SPEC.fullmatch(spec)
    if match is None:
        raise UsageError(f"no delay {spec!r}: use none, fixed:K or lognormal:MIN-MAX, in steps")
    if match["steps"] is not None:
        return Delay(int(match["steps"]), int(match["steps"]))
    if match["least"] is None:
        return NO_DELAY
    least, most = int(match["least"]), int(match["most"])
    if not 1 <= least <= most:
        raise UsageError(f"{spec!r}: a log-normal delay needs 1 <= MIN <= MAX")
    return Delay(least, most)


@dataclass(slots=True)
class InTransit:
    """Versions under way to one generator. Version n is sent after step n and arrives `delay` steps later."""

    delay: Delay
    source: random.Random
    served: int = 0
    _arrivals: dict[int, int] = field(default_factory=dict)

    def send(self, version: int) -> None:
        """A version leaves the learner."""
        self._arrivals[version] = version + self.delay.draw(self.source)

    def receive(self, step: int) -> int | None:
        """The version to serve from now on, after `step` steps; None where nothing newer has arrived."""
        arrived = [version for version, at in self._arrivals.items() if at <= step]
        if not arrived:
            return None
        self.served = max(arrived)
        self._arrivals = {version: at for version, at in self._arrivals.items() if version > self.served}
        return self.served
