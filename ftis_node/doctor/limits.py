"""Checks of the node's limits: whether this machine has the disk space and open files that they allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.config.limits import usual_home_bytes
from ftis_node.doctor.check_result import CheckResult
from ftis_node.node.storage.usage import measure_usage
from ftis_node.node.supervision.process_limits import MIN_OPEN_FILES, open_files
from ftis_node.telemetry.sizes import size
from ftis_node.workers.durable import newest_complete

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftis_node.config.home import Home
    from ftis_node.config.node import NodeSettings

CHECKPOINT_PREFIX = "step-"  # as in learner/checkpoint/checkpoint.py, which imports torch


def check_limits(home: Home, settings: NodeSettings | None) -> Iterator[CheckResult]:
    """Yield whether the disk has the space that `settings` allow the home, and the system enough open files."""
    if settings is not None:
        yield _room(home, settings)
    yield files_in(open_files().reachable)


def files_in(reachable: int) -> CheckResult:
    """Return the result for this limit of open files."""
    text = f"a process may open {reachable} files"
    if reachable < MIN_OPEN_FILES:
        advice = f"{MIN_OPEN_FILES} are needed: raise `ulimit -Hn`, LimitNOFILE of a unit, --ulimit of a container"
        return CheckResult("limits.files", "fail", text, advice)
    return CheckResult("limits.files", "ok", text)


def _room(home: Home, settings: NodeSettings) -> CheckResult:
    use = measure_usage(home, keep_checkpoints=settings.learner.keep_checkpoints)
    limit = settings.limits.home_bytes or _usual(home, settings)
    if limit is None:
        return CheckResult(
            "limits.disk", "ok", "no limit is set; the default depends on the size of the model's checkpoints"
        )
    text = f"the home has {size(use.used_bytes)} of at most {size(limit)}; {size(use.free_bytes)} are free"
    if use.used_bytes + use.free_bytes < limit:
        advice = "free disk space, or set a lower limits.home_bytes; on a full disk the node pauses"
        return CheckResult("limits.disk", "warn", text, advice, limit)
    return CheckResult("limits.disk", "ok", text, num_bytes=limit)


def _usual(home: Home, settings: NodeSettings) -> int | None:
    """Return the default limit, by the size of the newest checkpoint; None before the first."""
    newest = newest_complete(home.checkpoints, CHECKPOINT_PREFIX)
    if newest is None:
        return None
    return usual_home_bytes(
        settings.limits,
        buffer_bytes=max(settings.buffer.max_disk_bytes, settings.buffer.max_ready_bytes),
        checkpoint_bytes=sum(file.stat().st_size for file in newest.iterdir()),
        keep_checkpoints=settings.learner.keep_checkpoints,
        weights_bytes=0,
    )
