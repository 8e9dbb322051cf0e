"""Roles of a node: generating, learning, both or neither. Transfer of weights from a learner to remote generators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator

from ftis_node.config.delay import Delay, parse_delay
from ftis_node.config.section import Section
from ftis_node.errors import ConfigError
from ftis_node.records.names import Role


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
