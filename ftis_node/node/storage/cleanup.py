"""What goes when a home is nearly full, the least needed first, and no more than is needed.

    0  pages of the buffer's file that hold nothing
    1  used groups, the oldest first: peers that want them find them elsewhere
    2  turned-over logs, then turned-over events, the oldest first
    3  checkpoints that were set aside as damaged, then all but the newest

What is READY or in a step stays, and so do the newest checkpoint, the identity, and whatever the node did not write.
"""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

from ftis_node.node.storage.log_rotation import rotate_log
from ftis_node.node.supervision.background import in_background
from ftis_node.telemetry.events import event_log_files
from ftis_node.workers.durable import keep_newest, newest_complete

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

    from ftis_node.config.home import Home
    from ftis_node.node.storage.usage import HomeUse
    from ftis_node.node.supervision.disk_thread import DiskThread
    from ftis_node.replay.buffer import ReplayBuffer

CHECKPOINT_PREFIX = "step-"  # as learner/checkpoint/checkpoint.py has it, which imports torch
DAMAGED_PREFIX = "damaged-"
TURNED_OVER = re.compile(r".+\.log\.\d+")


async def reclaim(
    missing_bytes: int,
    *,
    home: Home,
    buffer: ReplayBuffer,
    disk: DiskThread,
    learns: bool,
    measure: Callable[[], Awaitable[HomeUse]],
) -> AsyncIterator[tuple[str, int]]:
    """Remove files until `missing_bytes` are free or no file may go; yield what went and how many bytes that freed.

    `measure` returns the present use of the home.
    """
    wanted_bytes = (await measure()).used_bytes - missing_bytes
    saved_step = _saved_step(home) if learns else None
    steps: tuple[tuple[str, Callable[[int], Awaitable[object]]], ...] = (
        ("free pages", lambda _: disk(buffer.shrink)),
        ("used groups", lambda num_bytes: disk(buffer.give_up, num_bytes, saved_step=saved_step)),
        ("old logs", lambda num_bytes: in_background(_remove_first, _old_logs(home), num_bytes)),
        ("old events", lambda num_bytes: _remove_old_events(home, num_bytes)),
        ("old checkpoints", lambda _: in_background(_remove_old_checkpoints, home)),
    )
    for what, remove in steps:
        before = (await measure()).used_bytes
        if before <= wanted_bytes:
            return
        await remove(before - wanted_bytes)
        if (freed_bytes := before - (await measure()).used_bytes) > 0:
            yield what, freed_bytes


def rotate_logs(home: Home, *, max_bytes: int) -> list[Path]:
    """Rotate the log files of the home that are too long; return their paths. Raise OSError."""
    return [path for path in home.logs.glob("*.log") if rotate_log(path, max_bytes=max_bytes)]


def _saved_step(home: Home) -> int:
    """Return the step of the newest checkpoint; 0 before the first."""
    newest = newest_complete(home.checkpoints, CHECKPOINT_PREFIX)
    return 0 if newest is None else int(newest.name.removeprefix(CHECKPOINT_PREFIX))


def _old_logs(home: Home) -> Iterator[Path]:
    return (path for path in sorted(home.logs.iterdir()) if TURNED_OVER.fullmatch(path.name))


async def _remove_old_events(home: Home, num_bytes: int) -> None:
    """Remove the oldest first, so that the rest is contiguous. Runs in the event loop, which also rotates the trail."""
    _remove_first((path for path in event_log_files(home.events) if path != home.events), num_bytes)


def _remove_first(paths: Iterator[Path], num_bytes: int) -> None:
    """Remove files until so much has gone."""
    for path in paths:
        if num_bytes <= 0:
            return
        num_bytes -= path.stat().st_size
        path.unlink()


def _remove_old_checkpoints(home: Home) -> None:
    for path in home.checkpoints.glob(f"{DAMAGED_PREFIX}*"):
        shutil.rmtree(path)
    keep_newest(home.checkpoints, CHECKPOINT_PREFIX, keep=1)
