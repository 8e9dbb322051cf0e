"""Sections of node.toml that bound the use of the machine, the work, the buffer, and what is accepted of peers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ftis_node.config.section import Section
from ftis_node.telemetry.terminal_text import MIB

KEPT_CHECKPOINTS = 2  # the newest, and one to fall back to if that is damaged
LOG_FILE_BYTES = 16 * MIB  # of each file of `logs/`; one older file is kept
MAX_READY_GROUPS, MAX_READY_BYTES = 256, 512 * MIB  # foreign groups kept ready; above it the oldest are dropped
MAX_KEPT_GROUPS = 1_000_000  # the status counts all stored groups every second

Amount = Annotated[int, Field(ge=1, le=1 << 53)]
PeerId = Annotated[str, Field(min_length=8, max_length=128, pattern=r"^[1-9A-HJ-NP-Za-km-z]+$")]
MAX_LISTED = 4096


class BudgetSection(Section):
    """The node's total work over all restarts of its home. An unset limit is none (ftis-node docs train/domains)."""

    generate_tokens: Amount | None = None
    """Completion tokens that the node generates. At the limit it begins no further group, and trains on those of peers
    only. Evaluations do not count."""
    learn_steps: Amount | None = None
    """Steps after which the node ends, as `--steps`."""
    learn_tokens: Amount | None = None
    """Completion tokens, own and foreign, on which the node trains before it ends. It completes the step that reaches
    the limit."""


class LimitsSection(Section):
    """Limits on the node's use of its machine. `status` reports what they delay (ftis-node docs operate/resources)."""

    home_bytes: int = Field(default=0, ge=0, le=1 << 60)
    """Disk space of the whole home: groups, checkpoints, weights, events, logs. Near the limit the node deletes used
    groups first, then old logs and events, then older checkpoints. After that it stops generating and pulling until
    there is space. 0: derived from the other limits and the size of the model's checkpoints."""
    nice: int = Field(default=0, ge=0, le=19)
    """CPU niceness of the node and all its processes. At 10 other programs stay responsive."""


class BufferSection(Section):
    """The replay buffer."""

    max_disk_bytes: int = Field(default=4 << 30, ge=1 << 18, le=1 << 50)
    """Total size of the stored envelopes. At the limit, or above a million groups, the node deletes used groups
    first."""


class AccessSection(Section):
    """Allow-list and trusted peers."""

    allow: tuple[PeerId, ...] = Field(default=(), max_length=MAX_LISTED)
    """Peer ids of a private swarm. The node pulls from, serves and admits only these. Empty: all peers."""
    trust: tuple[PeerId, ...] = Field(default=(), max_length=MAX_LISTED)
    """Peer ids that the node never bans by itself. Each may hold half of the buffer."""


class ValidationSection(Section):
    """The audit of incoming groups: the learner recomputes their log-probs (ftis-node docs reference/refusals)."""

    audit_fraction: float = Field(default=0.1, ge=0, le=1)
    """Fraction of the groups that claim this node's present weights whose log-probs the learner recomputes. For a peer
    on probation it recomputes all. 0: none."""
    audit_folders: bool = False
    """Whether to audit groups of a model given as a folder, by its name. Set it only if all peers with this name have
    the same weights. The node always audits models named by hub id, unless one is quantized."""
