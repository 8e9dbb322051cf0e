"""Sections of node.toml that bound the node's use of its machine, its work, its buffer, and what it accepts of peers.

Limits of one part are in the section of that part: `buffer.max_disk_bytes`, `buffer.max_ready_bytes`,
`swarm.max_upload_bytes_per_s`, `swarm.max_download_bytes_per_s`, `generation.threads`, `learner.threads`.
"""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import Field, model_validator

from ftis_node.config.section import Section

MIB = 1 << 20
KEPT_EVENT_FILES = 3  # rotated files; the current one comes on top
MIN_THREADS = 2

Amount = Annotated[int, Field(ge=1, le=1 << 53)]
PeerId = Annotated[str, Field(min_length=8, max_length=128, pattern=r"^[1-9A-HJ-NP-Za-km-z]+$")]
MAX_LISTED = 4096


class BudgetSection(Section):
    """The node's total work over all restarts of its home. An unset limit is none (ftis-node docs train/domains)."""

    generate_tokens: Amount | None = Field(
        default=None,
        description="Completion tokens that the node generates. At the limit it begins no further group, and trains "
        "on those of peers only. Evaluations do not count.",
    )
    learn_steps: Amount | None = Field(default=None, description="Steps after which the node ends, as `--steps`.")
    learn_tokens: Amount | None = Field(
        default=None,
        description="Completion tokens, own and foreign, on which the node trains before it ends. It completes the "
        "step that reaches the limit.",
    )


class LimitsSection(Section):
    """Limits on the node's use of its machine. `status` reports what they delay (ftis-node docs operate/resources)."""

    home_bytes: int = Field(
        default=0,
        ge=0,
        le=1 << 60,
        description="Disk space of the whole home: groups, checkpoints, weights, events, logs. Near the limit the "
        "node deletes used groups first, then old logs and events, then older checkpoints. After that it stops "
        "generating and pulling until there is space. 0: derived from the other limits and the size of the model's "
        "checkpoints.",
    )
    event_file_bytes: int = Field(
        default=64 * MIB, ge=64 << 10, le=1 << 40,
        description=f"Size at which `events.jsonl` is rotated; {KEPT_EVENT_FILES} older files are kept.",
    )  # fmt: skip
    log_file_bytes: int = Field(
        default=16 * MIB, ge=64 << 10, le=1 << 40,
        description="Size at which each file of `logs/` is rotated; one older file is kept.",
    )  # fmt: skip
    bodies_in_memory_bytes: int = Field(
        default=128 * MIB, ge=1 * MIB, le=1 << 40,
        description="Memory for received groups that are not on disk yet. A pull that may exceed it waits.",
    )  # fmt: skip
    nice: int = Field(
        default=0,
        ge=0,
        le=19,
        description="CPU niceness of the node and all its processes. At 10 other programs stay responsive.",
    )
    daemon_threads: int = Field(
        default=0, ge=0, le=1024,
        description="CPU threads of the daemon's libraries and of its network process; 0: a quarter of the cores, "
        "at least 2. For the workers see `generation.threads` and `learner.threads`.",
    )  # fmt: skip

    @property
    def num_daemon_threads(self) -> int:
        return self.daemon_threads or max(MIN_THREADS, (os.cpu_count() or MIN_THREADS) // 4)


class BufferSection(Section):
    """The replay buffer."""

    max_ready_groups: int = Field(
        default=256, ge=2, le=100000, description="Foreign groups kept ready. Above it the oldest are dropped."
    )
    max_ready_bytes: int = Field(
        default=512 << 20,
        ge=1 << 16,
        le=1 << 50,
        description="Total size of the foreign groups that are ready. Above it the node drops the oldest groups of the "
        "sender with the most bytes.",
    )
    max_disk_bytes: int = Field(
        default=4 << 30,
        ge=1 << 18,
        le=1 << 50,
        description="Total size of the stored envelopes. At the limit the node deletes used groups first.",
    )


class AccessSection(Section):
    """Allow-list, trusted peers and bans."""

    allow: tuple[PeerId, ...] = Field(
        default=(),
        max_length=MAX_LISTED,
        description="Peer ids of a private swarm. The node pulls from, serves and admits only these. Empty: all peers.",
    )
    trust: tuple[PeerId, ...] = Field(
        default=(),
        max_length=MAX_LISTED,
        description="Peer ids that the node never bans by itself. Each may hold the fraction "
        "`rate_limits.max_buffer_fraction_per_trusted_peer` of the buffer.",
    )
    ban_initial_s: float = Field(
        default=300.0, gt=0, le=86400, description="Length of a peer's first ban. Each further ban is twice as long."
    )
    ban_max_s: float = Field(default=86400.0, gt=0, le=30 * 86400, description="Length of the longest ban.")

    @model_validator(mode="after")
    def _bans_grow(self) -> AccessSection:
        if self.ban_max_s < self.ban_initial_s:
            raise ValueError(
                f"access.ban_max_s ({self.ban_max_s:g}) is shorter than ban_initial_s ({self.ban_initial_s:g})"
            )
        return self


class RateLimitsSection(Section):
    """Rate limits and buffer quotas by peer. A new peer has not yet delivered enough valid groups to be known."""

    groups_per_minute: float = Field(default=6000.0, gt=0, le=1e6, description="Groups checked for one sender.")
    tokens_per_minute: float = Field(
        default=20e6, gt=0, le=1e10, description="Completion tokens checked for one sender."
    )
    scoring_s_per_minute: float = Field(
        default=20.0, gt=0, le=3600,
        description="Seconds of scoring for the groups of one sender. Above it the node refuses them "
        "(`scoring_quota`).",
    )  # fmt: skip
    new_peers_groups_per_minute: float = Field(
        default=30000.0, gt=0, le=1e7, description="Groups checked for all new peers together."
    )
    new_peers_tokens_per_minute: float = Field(
        default=100e6, gt=0, le=1e11, description="Completion tokens checked for all new peers together."
    )
    new_peers_scoring_s_per_minute: float = Field(
        default=40.0, gt=0, le=3600,
        description="Seconds of scoring for all new peers together. A separate process scores their groups.",
    )  # fmt: skip
    max_buffer_fraction_per_peer: float = Field(
        default=0.25, gt=0, le=1,
        description="Largest fraction of the buffer's places for foreign groups that one sender may hold. Among k "
        "senders each may hold at least 1 / k.",
    )  # fmt: skip
    max_buffer_fraction_per_trusted_peer: float = Field(
        default=0.5, gt=0, le=1, description="The same fraction for a trusted sender."
    )


class ValidationSection(Section):
    """Limits of the checks on incoming groups (ftis-node docs reference/rejections)."""

    max_clock_skew_s: float = Field(
        default=60.0, gt=0, le=3600,
        description="The node refuses a group whose time is more seconds ahead than this (`clock_skew`).",
    )  # fmt: skip
    min_mean_logprob: float = Field(
        default=-14.0, ge=-100, lt=0,
        description="Lowest mean log-prob of a group, in nats per token. A uniform choice among 10^6 tokens has -14.",
    )  # fmt: skip
    max_logprob_gap_nats: float = Field(
        default=16.0, ge=4, le=1000,
        description="How many nats above the sender's log-probs the learner may score a completion. Above it the step "
        "excludes the completion and penalizes the sender (`understated_logprobs`). Honest log-probs exceed t nats "
        "with a probability of at most e^-t.",
    )  # fmt: skip
    duplicate_min_tokens: int = Field(
        default=32, ge=8, le=1 << 20,
        description="Shortest completion that can count as a duplicate. Shorter ones may be equal by chance.",
    )  # fmt: skip
    duplicate_max_fraction: float = Field(
        default=0.25, ge=0, lt=1,
        description="The node refuses a group if more than this fraction of its long completions are duplicates "
        "(`duplicate_completions`).",
    )  # fmt: skip
    duplicate_history_size: int = Field(
        default=4 << 20, ge=64, le=1 << 30,
        description="Completion tokens kept to detect duplicates, 8 bytes each.",
    )  # fmt: skip
    audit_fraction: float = Field(
        default=0.1, ge=0, le=1,
        description="Fraction of the groups that claim this node's present weights whose log-probs the learner "
        "recomputes. For a peer on probation it recomputes all. 0: none.",
    )  # fmt: skip
    audit_max_kl: float = Field(
        default=0.1, gt=0, le=100,
        description="Largest KL between the claimed and the recomputed log-probs, in nats per token. Number formats "
        "alone cause up to 0.002.",
    )  # fmt: skip
    audit_folders: bool = Field(
        default=False,
        description="Whether to audit groups of a model given as a folder, by its name. Set it only if all peers with "
        "this name have the same weights. The node always audits models named by hub id.",
    )


class Admission(Section):
    """The three sections together."""

    access: AccessSection = AccessSection()
    rate_limits: RateLimitsSection = RateLimitsSection()
    validation: ValidationSection = ValidationSection()
