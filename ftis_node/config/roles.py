"""Roles of a node: generating, learning, both or neither. Transfer of weights from a learner to remote generators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator

from ftis_node.config.delay import Delay, parse_delay
from ftis_node.config.section import Section
from ftis_node.errors import ConfigError

Role = Literal["full", "generator", "learner", "exchange"]


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


class RolesSection(Section):
    """Transfer of weights between nodes, from the role `learner` to the role `generator`."""

    follow: str = Field(
        default="",
        max_length=64,
        description="Generator: peer id of the one learner whose weights it fetches (`ftis-node status` on the "
        "learner shows it).",
    )
    weights_delay: str = Field(
        default="none",
        max_length=64,
        description="Generator: age in seconds at which it starts to use a version: `none`, `fixed:S`, or "
        "`lognormal:MIN-MAX`, drawn again for each version; up to 1800.",
    )
    poll_interval_s: float = Field(
        default=1.0, ge=0.05, le=600, description="Generator: seconds between polls for a new version."
    )
    poll_timeout_s: float = Field(
        default=10.0,
        gt=0,
        le=600,
        description="Generator: after this long without an answer the learner counts as unreachable.",
    )
    max_pending_versions: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Generator: versions kept on disk during their delay. If more are on the way, some are skipped.",
    )
    evaluate: bool = Field(
        default=False,
        description="Generator: evaluate each version that it serves, at the run's `eval.every_steps`.",
    )
    publish_every_steps: int = Field(
        default=1, ge=1, le=100000, description="Learner: steps between published versions."
    )
    max_published_versions: int = Field(
        default=4,
        ge=2,
        le=64,
        description="Learner: versions kept for generators: the two newest, and older ones that a generator is "
        "fetching.",
    )
    weights_for: Literal["members", "trusted"] = Field(
        default="members",
        description="Learner: peers that may fetch its weights: all members of the run, or only trusted peers "
        "(`access.trust`, `ftis-node peers trust`).",
    )

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
