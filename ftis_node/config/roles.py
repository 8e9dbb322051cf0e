"""What a node does of the two, generating and learning, and how weights go from a learner to generators elsewhere."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from ftis_node.config.delay import Delay, parse_delay
from ftis_node.config.section import Section
from ftis_node.errors import ConfigError

Role = Literal["full", "generator", "learner"]

MAX_DELAY_S = 1800.0  # HeteroRL's largest


class RolesSection(Section):
    """Weights between nodes, for the roles `learner` (gives them) and `generator` (takes them)."""

    follow: str = Field(
        default="",
        max_length=64,
        description="Generator: the peer id of the learner whose weights it takes, and nobody else's "
        "(`ftis-node status` on the learner shows it).",
    )
    weights_delay: str = Field(
        default="none",
        max_length=64,
        description="Generator: how old a version must be before it is served, in seconds: `none`, `fixed:S`, or "
        "`lognormal:MIN-MAX` drawn anew for each version; up to 1800.",
    )
    poll_interval_s: float = Field(
        default=1.0, ge=0.05, le=600, description="Generator: seconds between looks for a new version."
    )
    poll_timeout_s: float = Field(
        default=10.0, gt=0, le=600, description="Generator: a look that takes longer finds the learner away."
    )
    max_pending_versions: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Generator: versions kept on disk while their delay runs; with more on the way, some are left out.",
    )
    evaluate: bool = Field(
        default=False,
        description="Generator: evaluate a version when it is served, as often as the run's `eval.every_steps` says.",
    )
    publish_every_steps: int = Field(
        default=1, ge=1, le=100000, description="Learner: steps between versions that are offered."
    )
    max_published_versions: int = Field(
        default=4,
        ge=2,
        le=64,
        description="Learner: versions kept for generators: the two newest, and older ones that are being fetched.",
    )
    weights_for: Literal["members", "trusted"] = Field(
        default="members",
        description="Learner: who may fetch its weights: every member of the run, or only the peers that are trusted "
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
        """The delay in seconds."""
        return parse_delay(self.weights_delay, unit="seconds", most=MAX_DELAY_S)
