"""Delays of new weights on their way to a generator, as a spec says: a fixed or a random time.

HeteroRL (arXiv 2508.17850) trains with samplers far from the learner. The weights of a sampler are late by a delay,
drawn again for each version. A node counts it in seconds, a simulated experiment in optimizer steps.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from typing import Literal

from ftis_node.errors import ConfigError

Unit = Literal["steps", "seconds"]

NUMBERS: dict[Unit, str] = {"steps": r"\d+", "seconds": r"\d+(?:\.\d+)?"}
SPEC = r"none|fixed:(?P<fixed>{number})|lognormal:(?P<least>{number})-(?P<most>{number})"
SIGMAS_INSIDE = 2  # standard deviations from the median to each bound of a log-normal delay


@dataclass(frozen=True, slots=True)
class Delay:
    """A distribution of delays between `least` and `most`: log-normal, clipped at both.

    Its median is the geometric mean of the bounds. Delays in steps are whole numbers.
    """

    least: float
    most: float
    unit: Unit = "steps"

    def draw(self, source: random.Random) -> float:
        if self.least == self.most:
            return self.least
        low, high = math.log(self.least), math.log(self.most)
        drawn = source.lognormvariate((low + high) / 2, (high - low) / (2 * SIGMAS_INSIDE))
        return min(self.most, max(self.least, round(drawn) if self.unit == "steps" else drawn))


def parse_delay(spec: str, *, unit: Unit = "steps", most: float = math.inf) -> Delay:
    """Return the delay of `none`, `fixed:K` or `lognormal:MIN-MAX`. Raises ConfigError for other text, or a delay above
    `most`.
    """
    match = re.fullmatch(SPEC.format(number=NUMBERS[unit]), spec)
    if match is None:
        raise ConfigError(f"invalid delay {spec!r}: use none, fixed:K or lognormal:MIN-MAX, in {unit}")
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
