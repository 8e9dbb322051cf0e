"""How late new weights reach a generator: what a spec means, in whatever unit its owner counts.

HeteroRL (arXiv 2508.17850) trains where learner and samplers lie far apart: a sampler works with weights that are late
by a delay drawn anew for each version. A node counts in seconds, an experiment in virtual time in optimiser steps.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ftis_node.errors import ConfigError

if TYPE_CHECKING:
    import random

Unit = Literal["steps", "seconds"]

NUMBERS: dict[Unit, str] = {"steps": r"\d+", "seconds": r"\d+(?:\.\d+)?"}
SPEC = r"none|fixed:(?P<fixed>{number})|lognormal:(?P<least>{number})-(?P<most>{number})"
SIGMAS_INSIDE = 2  # the bounds of a log-normal delay lie so many standard deviations from its median


@dataclass(frozen=True, slots=True)
class Delay:
    """Delays between `least` and `most`: log-normal with the bounds' geometric mean as median, cut at both.

    In steps they are whole numbers.
    """

    least: float
    most: float
    unit: Unit = "steps"

    def draw(self, source: random.Random) -> float:
        """One delay."""
        if self.least == self.most:
            return self.least
        low, high = math.log(self.least), math.log(self.most)
        drawn = source.lognormvariate((low + high) / 2, (high - low) / (2 * SIGMAS_INSIDE))
        return min(self.most, max(self.least, round(drawn) if self.unit == "steps" else drawn))


def parse_delay(spec: str, *, unit: Unit = "steps", most: float = math.inf) -> Delay:
    """`none`, `fixed:K` or `lognormal:MIN-MAX`, none above `most`. Raises ConfigError."""
    match = re.fullmatch(SPEC.format(number=NUMBERS[unit]), spec)
    if match is None:
        raise ConfigError(f"no delay {spec!r}: use none, fixed:K or lognormal:MIN-MAX, in {unit}")
    count = int if unit == "steps" else float
    if match["least"] is not None:
        delay = Delay(count(match["least"]), count(match["most"]), unit)
        if not 0 < delay.least <= delay.most:
            raise ConfigError(f"{spec!r}: a log-normal delay needs 0 < MIN <= MAX")
    else:
        fixed = count(match["fixed"] or 0)
        delay = Delay(fixed, fixed, unit)
    if delay.most > most:
        raise ConfigError(f"{spec!r}: at most {most:g} {unit}")
    return delay
