"""The usual size of a home, from the settings and the model: checkpoints, weight versions, the buffer, logs."""

from __future__ import annotations

from contextlib import suppress

from ftis_node.config.limits import KEPT_CHECKPOINTS, LOG_FILE_BYTES, MAX_READY_BYTES
from ftis_node.config.node import NodeSettings
from ftis_node.config.roles import MAX_PENDING_VERSIONS, MAX_PUBLISHED_VERSIONS
from ftis_node.errors import ConfigError, ModelError
from ftis_node.models import ModelSource, parameter_count, read_shape
from ftis_node.node.storage.disk_space import HomeLimit
from ftis_node.node.worker_settings import dtype_of, serves_adapters
from ftis_node.telemetry.events import EVENT_FILE_BYTES, KEPT_EVENT_FILES
from ftis_node.telemetry.terminal_text import size
from ftis_node.workers.weight_store import VERSIONS_AS_A_RESERVE, VERSIONS_AT_ONCE, Transfer

NUM_LOGS = 2  # a worker each
BUFFER_OVERHEAD = 1.25  # indexes, prompts, partly filled pages, the journal
SLACK_BYTES = 1 << 30  # trackers' files, the table of peers
GROUPS_BYTES = 16 << 20  # groups in progress, event log lines, the buffer's journal
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
MOMENTS_BYTES = {"float32": 8, "offload": 8, "8bit": 2}  # of both Adam moments, per parameter


def checkpoint_bytes(source: ModelSource, settings: NodeSettings) -> int:
    """Return the bytes of one checkpoint: float32 weights and Adam's moments, of the full model or the adapter."""
    num_trained = parameter_count(source)
    if settings.lora:
        with suppress(ModelError):  # without a known shape, use the full model as an upper bound
            num_trained = read_shape(source).adapter_parameters(settings.lora_adapter.rank)
    return num_trained * (DTYPE_BYTES["float32"] + MOMENTS_BYTES[settings.learner.optimizer_states])


def limit_of(settings: NodeSettings, source: ModelSource) -> HomeLimit:
    """Return the home's limit. Raise ConfigError if the node's minimum is above the limit."""
    checkpoint = checkpoint_bytes(source, settings) if settings.learns else 0
    limits, reserve = settings.limits, checkpoint + GROUPS_BYTES
    if not limits.home_bytes:
        num_followed = MAX_PENDING_VERSIONS + 1 if settings.role == "generator" else 0  # plus the download
        weights_bytes = (num_versions(settings) + num_followed) * version_bytes(settings, source)
        return HomeLimit(usual_home_bytes(settings, checkpoint_bytes=checkpoint, weights_bytes=weights_bytes), reserve)
    limit = HomeLimit(limits.home_bytes, reserve)
    needed = checkpoint + reserve + limit.cushion_bytes
    if needed > limits.home_bytes:
        raise ConfigError(
            f"limits.home_bytes is {size(limits.home_bytes)}, and two checkpoints and the groups need at least "
            f"{size(needed)}: raise or remove the limit, or train an adapter (--lora)"
        )
    return limit


def usual_home_bytes(settings: NodeSettings, *, checkpoint_bytes: int, weights_bytes: int) -> int:
    """Return the size of a home with every part at its limit: the default of `limits.home_bytes`.

    1.25 x the buffer + (the kept checkpoints + the one in progress) x `checkpoint_bytes` + `weights_bytes` (versions
    on their way to the generator) + 4 event files + 2 files of each worker's log + 1 GiB for all else.
    """
    buffer = max(settings.buffer.max_disk_bytes, MAX_READY_BYTES)
    checkpoints = (KEPT_CHECKPOINTS + 1) * checkpoint_bytes
    events = (KEPT_EVENT_FILES + 1) * EVENT_FILE_BYTES
    logs = NUM_LOGS * 2 * LOG_FILE_BYTES
    return int(BUFFER_OVERHEAD * buffer) + checkpoints + weights_bytes + events + logs + SLACK_BYTES


def num_versions(settings: NodeSettings, transfer: Transfer = "file") -> int:
    """Return the number of versions on disk between learner and generator, plus those that a learner node offers.

    With `transfer` "ipc" the learner writes a file only for an engine that cannot map its GPU memory.
    """
    if not settings.generates and not settings.learns:
        return 0
    at_once = VERSIONS_AS_A_RESERVE if transfer == "ipc" else VERSIONS_AT_ONCE
    return at_once + (0 if settings.generates else MAX_PUBLISHED_VERSIONS)


def version_bytes(settings: NodeSettings, source: ModelSource) -> int:
    """Return the size of the weights in one weight sync, in bytes."""
    if serves_adapters(settings):
        num_values = read_shape(source).adapter_parameters(settings.lora_adapter.rank)
    else:
        num_values = parameter_count(source)
    return num_values * DTYPE_BYTES[dtype_of(settings)]
