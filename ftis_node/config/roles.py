"""Roles of a node: generating, learning, both or neither. Transfer of weights to remote generators, and its delays."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator

from ftis_node.config.section import Section
from ftis_node.errors import ConfigError
from ftis_node.records.names import Role

Unit = Literal["steps", "seconds"]

NUMBERS: dict[Unit, str] = {"steps": r"\d+", "seconds": r"\d+(?:\.\d+)?"}
SPEC = r"none|fixed:(?P<fixed>{number})|lognormal:(?P<least>{number})-(?P<most>{number})"
SIGMAS_INSIDE = 2  # standard deviations from the median to each bound of a log-normal delay


@dataclass(frozen=True, slots=True)
class Delay:
    """A distribution of delays of new weights on their way to a generator (HeteroRL, arXiv 2508.17850).

    It is log-normal, clipped at `least` and `most`. Its median is the geometric mean of the bounds. A node counts in
    seconds. A simulated experiment counts in optimizer steps, which are whole numbers.
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


@dataclass(frozen=True, slots=True)
class RoleTraits:
    """Workers of a node in one role. `does` goes with the name of the model in the first line of `join`."""

    generates: bool
    learns: bool
    does: str


ROLES: dict[Role, RoleTraits] = {
    "full": RoleTraits(generates=True, learns=True, does="generates with and trains"),
    "generator": RoleTraits(generates=True, learns=False, does="generates with"),
    "learner": RoleTraits(generates=False, learns=True, does="trains"),
    "exchange": RoleTraits(generates=False, learns=False, does="exchanges groups of"),
}

MAX_DELAY_S = 1800.0  # HeteroRL's largest
MAX_PENDING_VERSIONS = 4  # kept by a generator during their delay; of more on the way, some are skipped
MAX_PUBLISHED_VERSIONS = 4  # kept by a learner: the two newest, and older ones that a generator is fetching


class RolesSection(Section):
    """Transfer of weights between nodes, from the role `learner` to the role `generator`."""

    follow: str = Field(default="", max_length=64)
    """Generator: peer id of the one learner whose weights it fetches (`ftis-node status` on the learner shows it)."""
    weights_delay: str = Field(default="none", max_length=64)
    """Generator: age in seconds at which it starts to use a version: `none`, `fixed:S`, or `lognormal:MIN-MAX`, drawn
    again for each version; up to 1800."""
    evaluate: bool = False
    """Generator: evaluate each version that it serves, at the run's `eval.every_steps`."""
    weights_for: Literal["members", "trusted"] = "members"
    """Learner: peers that may fetch its weights: all members of the run, or only trusted peers (`access.trust`,
    `ftis-node peers trust`)."""

    @field_validator("weights_delay")
    @classmethod
    def _is_a_delay(cls, value: str) -> str:
        try:
            parse_delay(value, unit="seconds", most=MAX_DELAY_S)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value

    @property
    def delay(self) -> Delay:
        """Distribution of the delay, in seconds."""
        return parse_delay(self.weights_delay, unit="seconds", most=MAX_DELAY_S)
