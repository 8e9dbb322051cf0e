"""`[limits]` of node.toml: how much of its machine the node may use. `[budget]`: its total work.

Limits of one part are in the section of that part: `buffer.max_disk_bytes`, `buffer.max_ready_bytes`,
`swarm.max_upload_bytes_per_s`, `swarm.max_download_bytes_per_s`, `generation.threads`, `learner.threads`.
"""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import Field

from ftis_node.config.section import Section

MIB, GIB = 1 << 20, 1 << 30
KEPT_EVENT_FILES = 3  # rotated files; the current one comes on top
KEPT_LOG_FILES = 1
NUM_LOGS = 2  # a worker each
BUFFER_OVERHEAD = 1.25  # indexes, prompts, partly filled pages, the journal
SLACK_BYTES = GIB  # trackers' files, backups of upgrades, the table of peers
MIN_THREADS = 2

Amount = Annotated[int, Field(ge=1, le=1 << 53)]


class BudgetSection(Section):
    """The node's total work over all restarts of its home. An unset limit is none (ftis-node docs train/domains)."""

    generate_tokens: Amount | None = Field(
        default=None,
        description="Completion tokens that the node generates. At the limit it cancels the groups in flight and "
        "trains on those of peers only. Evaluations do not count.",
    )
    learn_steps: Amount | None = Field(
        default=None, description="Optimizer steps after which the node ends, as `--steps`."
    )
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
        """CPU threads of the daemon on this machine."""
        return self.daemon_threads or max(MIN_THREADS, (os.cpu_count() or MIN_THREADS) // 4)


def usual_home_bytes(
    limits: LimitsSection, *, buffer_bytes: int, checkpoint_bytes: int, keep_checkpoints: int, weights_bytes: int
) -> int:
    """Return the size of a home with every part at its limit: the default of `home_bytes`.

    1.25 x `buffer_bytes` + (`keep_checkpoints` + the one in progress) x `checkpoint_bytes` + `weights_bytes` (versions
    on their way to the generator) + 4 event files + 2 files of each worker's log + 1 GiB for all else.
    """
    events = (KEPT_EVENT_FILES + 1) * limits.event_file_bytes
    logs = NUM_LOGS * (KEPT_LOG_FILES + 1) * limits.log_file_bytes
    checkpoints = (keep_checkpoints + 1) * checkpoint_bytes
    return int(BUFFER_OVERHEAD * buffer_bytes) + checkpoints + weights_bytes + events + logs + SLACK_BYTES
