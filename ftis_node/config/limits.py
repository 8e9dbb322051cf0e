"""`[limits]` of node.toml: what the node may use of its machine, so that it can be left alone there.

Limits that belong to one part stand in that part's section: `buffer.max_disk_bytes`, `buffer.max_ready_bytes`,
`swarm.max_upload_bytes_per_s`, `swarm.max_download_bytes_per_s`, `generation.threads`, `learner.threads`.
"""

from __future__ import annotations

import os

from pydantic import Field

from ftis_node.config.section import Section

MIB, GIB = 1 << 20, 1 << 30
KEPT_EVENT_FILES = 3  # turned-over ones, beside the one that is written
KEPT_LOG_FILES = 1
NUM_LOGS = 2  # a worker each
BUFFER_OVERHEAD = 1.25  # indexes, prompts, pages that are not full; the journal
SLACK_BYTES = GIB  # trackers' files, backups of upgrades, the table of peers
MIN_THREADS = 2


class LimitsSection(Section):
    """Limits on what the node may use of its machine; `status` reports what waits.

    See `ftis-node docs operate/resources`.
    """

    home_bytes: int = Field(
        default=0,
        ge=0,
        le=1 << 60,
        description="Disk of the whole home: groups, checkpoints, weights, events, logs. When it is near, used groups "
        "go first, then old logs and events, then older checkpoints; after that the node makes and pulls no more until "
        "there is room. 0: what the other limits and the model's checkpoints come to.",
    )
    event_file_bytes: int = Field(
        default=64 * MIB, ge=64 << 10, le=1 << 40,
        description=f"`events.jsonl` is turned over at this size; {KEPT_EVENT_FILES} older ones are kept.",
    )  # fmt: skip
    log_file_bytes: int = Field(
        default=16 * MIB, ge=64 << 10, le=1 << 40,
        description="Each file of `logs/` is turned over at this size; one older one is kept.",
    )  # fmt: skip
    bodies_in_memory_bytes: int = Field(
        default=128 * MIB, ge=1 * MIB, le=1 << 40,
        description="Memory for groups of peers between the wire and the disk; a pull that may bring more waits.",
    )  # fmt: skip
    nice: int = Field(
        default=0,
        ge=0,
        le=19,
        description="How far the node and all its processes stand back behind other programs, as `nice` counts: with "
        "10 a desktop stays quick while the node takes what is left of the processor.",
    )
    daemon_threads: int = Field(
        default=0, ge=0, le=1024,
        description="CPU threads of the daemon's libraries and of its network process; 0: a quarter of the cores, at "
        "least 2. Those of the workers: `generation.threads`, `learner.threads`.",
    )  # fmt: skip

    @property
    def num_daemon_threads(self) -> int:
        """How many that are here."""
        return self.daemon_threads or max(MIN_THREADS, (os.cpu_count() or MIN_THREADS) // 4)


def usual_home_bytes(
    limits: LimitsSection, *, buffer_bytes: int, checkpoint_bytes: int, keep_checkpoints: int, weights_bytes: int
) -> int:
    """What a home comes to whose parts are all as large as they may be: the limit where none is set.

    1.25 x `buffer_bytes` + (`keep_checkpoints` + the one that is being written) x `checkpoint_bytes` + `weights_bytes`
    (versions on their way to the generator) + 4 files of events + 2 of each worker's log + 1 GiB for all else.
    """
    events = (KEPT_EVENT_FILES + 1) * limits.event_file_bytes
    logs = NUM_LOGS * (KEPT_LOG_FILES + 1) * limits.log_file_bytes
    checkpoints = (keep_checkpoints + 1) * checkpoint_bytes
    return int(BUFFER_OVERHEAD * buffer_bytes) + checkpoints + weights_bytes + events + logs + SLACK_BYTES
