"""The size limit of a home: the setting, or else the sum of its parts. A setting that is too small is an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.config.limits import usual_home_bytes
from ftis_node.errors import ConfigError
from ftis_node.models import parameter_count, read_shape
from ftis_node.node.startup.preflight import checkpoint_bytes
from ftis_node.node.storage.usage import HomeLimit
from ftis_node.node.worker_settings import dtype_of, serves_adapters
from ftis_node.telemetry.terminal_text import size
from ftis_node.workers.weights.store import VERSIONS_AS_A_RESERVE, VERSIONS_AT_ONCE

if TYPE_CHECKING:
    from ftis_node.config.node import NodeSettings
    from ftis_node.models import ModelSource
    from ftis_node.workers.weights.shared_weights import Way

GROUPS_BYTES = 16 << 20  # groups in progress, event log lines, the buffer's journal
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def limit_of(settings: NodeSettings, source: ModelSource) -> HomeLimit:
    """Return the home's limit. Raise ConfigError if the node's minimum is above the limit."""
    checkpoint = checkpoint_bytes(source, settings) if settings.learns else 0
    limits, reserve = settings.limits, checkpoint + GROUPS_BYTES
    if not limits.home_bytes:
        num_followed = (
            settings.roles.max_pending_versions + 1 if settings.role == "generator" else 0
        )  # plus the download
        usual = usual_home_bytes(
            limits,
            buffer_bytes=max(settings.buffer.max_disk_bytes, settings.buffer.max_ready_bytes),
            checkpoint_bytes=checkpoint,
            keep_checkpoints=settings.learner.keep_checkpoints,
            weights_bytes=(num_versions(settings) + num_followed) * version_bytes(settings, source),
        )
        return HomeLimit(usual, reserve)
    limit = HomeLimit(limits.home_bytes, reserve)
    needed = checkpoint + reserve + limit.cushion_bytes
    if needed > limits.home_bytes:
        raise ConfigError(
            f"limits.home_bytes is {size(limits.home_bytes)}, and this model needs {size(needed)} at least (a "
            "checkpoint, the next one beside it, groups): allow more, train an adapter (--lora), or remove the limit"
        )
    return limit


def num_versions(settings: NodeSettings, way: Way = "file") -> int:
    """Return the number of versions on disk between learner and generator, plus those that a learner node offers.

    With the `way` "ipc" the learner writes a file only for an engine that cannot map its GPU memory.
    """
    if not settings.generates and not settings.learns:
        return 0
    at_once = VERSIONS_AS_A_RESERVE if way == "ipc" else VERSIONS_AT_ONCE
    return at_once + (0 if settings.generates else settings.roles.max_published_versions)


def version_bytes(settings: NodeSettings, source: ModelSource) -> int:
    """Return the size of the weights in one weight sync, in bytes."""
    if serves_adapters(settings):
        num_values = read_shape(source).adapter_parameters(settings.lora_adapter.rank)
    else:
        num_values = parameter_count(source)
    return num_values * DTYPE_BYTES[dtype_of(settings)]
