"""Sections of node.toml that bound the node's use of its machine, its work, its buffer, and what it accepts of peers.

Limits of one part are in the section of that part: `buffer.max_disk_bytes`, `buffer.max_ready_bytes`,
`swarm.max_upload_bytes_per_s`, `swarm.max_download_bytes_per_s`, `generation.threads`, `learner.threads`.
"""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import Field

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
    """Allow-list and trusted peers."""

    allow: tuple[PeerId, ...] = Field(
        default=(),
        max_length=MAX_LISTED,
        description="Peer ids of a private swarm. The node pulls from, serves and admits only these. Empty: all peers.",
    )
    trust: tuple[PeerId, ...] = Field(
        default=(),
        max_length=MAX_LISTED,
        description="Peer ids that the node never bans by itself. Each may hold half of the buffer.",
    )


class ValidationSection(Section):
    """The audit of incoming groups: the learner recomputes their log-probs (ftis-node docs reference/rejections)."""

    audit_fraction: float = Field(
        default=0.1, ge=0, le=1,
        description="Fraction of the groups that claim this node's present weights whose log-probs the learner "
        "recomputes. For a peer on probation it recomputes all. 0: none.",
    )  # fmt: skip
    audit_folders: bool = Field(
        default=False,
        description="Whether to audit groups of a model given as a folder, by its name. Set it only if all peers with "
        "this name have the same weights. The node always audits models named by hub id.",
    )
