"""`[door]` of node.toml: whom this node deals with, how much of it one peer may have, and when a peer is refused."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from ftis_node.config.section import Section

PeerId = Annotated[str, Field(min_length=8, max_length=128, pattern=r"^[1-9A-HJ-NP-Za-km-z]+$")]
MAX_LISTED = 4096


class DoorSection(Section):
    """The door's limits for peers (docs/reference/rejections.md), and the operator's lists."""

    allow: tuple[PeerId, ...] = Field(
        default=(),
        max_length=MAX_LISTED,
        description="Peer ids of a private swarm: these alone are pulled from, served and admitted; empty: everyone.",
    )
    trust: tuple[PeerId, ...] = Field(
        default=(),
        max_length=MAX_LISTED,
        description="Peer ids that are never banned by the node itself and may hold `trusted_share`.",
    )
    groups_a_minute: float = Field(
        default=6000.0, gt=0, le=1e6, description="Groups of one sender that are looked at in a minute."
    )
    tokens_a_minute: float = Field(
        default=20e6, gt=0, le=1e10, description="Completion tokens of one sender that are looked at in a minute."
    )
    strangers_groups_a_minute: float = Field(
        default=30000.0, gt=0, le=1e7,
        description="Groups a minute of all peers together that have not shown anything yet.",
    )  # fmt: skip
    strangers_tokens_a_minute: float = Field(
        default=100e6, gt=0, le=1e11, description="Completion tokens a minute of all such peers together."
    )
    scoring_s_a_minute: float = Field(
        default=20.0, gt=0, le=3600,
        description="Seconds a minute that scoring the groups of one sender may take; beyond, `scoring_quota`.",
    )  # fmt: skip
    strangers_scoring_s_a_minute: float = Field(
        default=40.0, gt=0, le=3600,
        description="The same of all peers together that have not shown anything yet; they have a scoring process of "
        "their own.",
    )  # fmt: skip
    share_cap: float = Field(
        default=0.25, gt=0, le=1,
        description="Largest part of the buffer's places for foreign groups that one sender may hold; among k senders "
        "each may hold 1 / k.",
    )  # fmt: skip
    trusted_share: float = Field(default=0.5, gt=0, le=1, description="The same for a trusted sender.")
    max_skew_s: float = Field(
        default=60.0, gt=0, le=3600, description="A group dated further ahead than this is refused (`clock`). Seconds."
    )
    ban_first_s: float = Field(
        default=300.0, gt=0, le=86400, description="Length of a peer's first ban; each further one is twice as long."
    )
    ban_longest_s: float = Field(default=86400.0, gt=0, le=30 * 86400, description="Length of the longest ban.")
    min_mean_logprob: float = Field(
        default=-14.0, ge=-100, lt=0,
        description="Lowest mean log-prob of a group, in nats a token; choosing blindly among 10^6 tokens gives -14.",
    )  # fmt: skip
    max_gain_nats: float = Field(
        default=16.0, ge=4, le=1000,
        description="How many nats likelier than its sender says the learner may find a completion; beyond, it is left "
        "out and the sender has lied (`understated`). Honest ones pass t nats with a chance of e^-t at most.",
    )  # fmt: skip
    copy_min_tokens: int = Field(
        default=32, ge=8, le=1 << 20,
        description="Completions shorter than this are never taken for copies: they may be equal by honest chance.",
    )  # fmt: skip
    copy_max_share: float = Field(
        default=0.25, ge=0, lt=1,
        description="A group of which more than this part of the long completions was here before is refused (`copy`).",
    )  # fmt: skip
    copy_kept: int = Field(
        default=32768, ge=64, le=1 << 22, description="Completions remembered for that, about 200 bytes each."
    )
    audit_share: float = Field(
        default=0.1, ge=0, le=1,
        description="Part of the groups that claim this node's very weights whose log-probs are compared with its own; "
        "of a watched peer all are. 0: none.",
    )  # fmt: skip
    audit_max_kl: float = Field(
        default=0.1, gt=0, le=100,
        description="Largest KL in nats a token by which those may differ; number formats alone make up to 0.002.",
    )  # fmt: skip
    audit_folders: bool = Field(
        default=False,
        description="Whether a model that was given as a folder is audited by its name: only where all peers that use "
        "the name have the same weights. Models named by their hub id always are.",
    )

    @model_validator(mode="after")
    def _bans_grow(self) -> DoorSection:
        if self.ban_longest_s < self.ban_first_s:
            raise ValueError(
                f"door.ban_longest_s ({self.ban_longest_s:g}) is shorter than ban_first_s ({self.ban_first_s:g})"
            )
        return self
