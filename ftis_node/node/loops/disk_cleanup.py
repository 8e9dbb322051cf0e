"""The disk cleanup loop: it rotates logs, frees space in a nearly full home, pauses while it is full.

Generation and pulling wait on `DiskSpace`. During a pause the node trains on the groups in its buffer and serves peers.
The cleanup removes the least needed kind of data first, and no further kind once enough space is free:

    0  free pages of the buffer's file
    1  released groups, oldest first: peers can fetch them from other nodes
    2  rotated logs, then rotated event logs from the oldest on
    3  checkpoints that were set aside as damaged, then all except the newest

It never removes READY groups, groups of a step, the newest checkpoint, the identity, or files of other programs.

Logs of workers are rotated by size. A worker writes to a file that it inherited, and cannot open another one. So
rotation copies the content to `generation.log.1` and truncates the file. The worker appends, so it continues at the
start of the file. A line that the worker writes between copy and truncation is lost. A pipe instead would let a full
pipe block the worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ftis_node.config.home import Home
from ftis_node.config.limits import LOG_FILE_BYTES
from ftis_node.files import is_disk_full
from ftis_node.node.storage.disk_space import HomeUse, measure_usage
from ftis_node.node.storage.node_store import Store
from ftis_node.node.supervision.process_limits import skip_without_files
from ftis_node.node.supervision.waits import in_background
from ftis_node.telemetry.events import event_log_files
from ftis_node.telemetry.log import RateLimitedLog
from ftis_node.telemetry.terminal_text import size
from ftis_node.workers.durable import CHECKPOINT_PREFIX, DAMAGED_PREFIX, checkpoint_step, keep_newest

log = logging.getLogger(__name__)
DISK_PERIOD_S = 2.0
ROTATED = re.compile(r".+\.log\.\d+")


@dataclass(eq=False, repr=False)
class DiskCleanupLoop:
    """Loop that measures the home every few seconds, and reclaims space if too little is free."""

    store: Store

    def __post_init__(self) -> None:
        self._reported, self._shortage = "", RateLimitedLog()

    async def run(self) -> None:
        """Run until canceled. Raise OSError for a home that cannot be read."""
        while True:
            await skip_without_files(self.check, self._shortage)
            await asyncio.sleep(DISK_PERIOD_S)

    async def check(self) -> None:
        """Rotate long logs, remove files if the disk is nearly full, report its use."""
        space, context = self.store.space, self.store.context
        await in_background(rotate_logs, self.store.home, max_bytes=LOG_FILE_BYTES)
        use = await self._use()
        if missing_bytes := space.limit.missing_bytes(use):
            reclaimed = reclaim(missing_bytes, store=self.store, learns=context.settings.learns, measure=self._use)
            async for what, num_bytes in reclaimed:
                log.debug("removed %s to free disk space: %s", what, size(num_bytes))
                context.events.write("disk_reclaimed", what=what, num_bytes=num_bytes)
            use = await self._use()
        space.note(use)
        self._report(use)

    async def _use(self) -> HomeUse:
        return await in_background(measure_usage, self.store.home)

    def _report(self, use: HomeUse) -> None:
        why_full = self.store.space.why_full
        if bool(why_full) == bool(self._reported):
            return
        self._reported = why_full
        change = "paused" if why_full else "resumed"
        self.store.context.events.write(change, reason=why_full, used_bytes=use.used_bytes, free_bytes=use.free_bytes)
        if why_full:
            log.warning("paused: no generation and no pulls until there is disk space: %s", why_full)
        else:
            log.info("resumed: there is disk space again")


async def reclaim(
    missing_bytes: int, *, store: Store, learns: bool, measure: Callable[[], Awaitable[HomeUse]]
) -> AsyncIterator[tuple[str, int]]:
    """Remove files until `missing_bytes` are free or no file is removable; yield each kind with the freed bytes.

    `measure` returns the present disk use of the home.
    """
    home, buffer, disk = store.home, store.buffer, store.disk
    target_bytes = (await measure()).used_bytes - missing_bytes
    saved_step = checkpoint_step(home.checkpoints) if learns else None
    old_logs = (path for path in sorted(home.logs.iterdir()) if ROTATED.fullmatch(path.name))
    steps: tuple[tuple[str, Callable[[int], Awaitable[object]]], ...] = (
        ("free pages", lambda _: disk.once(buffer.shrink)),
        ("used groups", lambda num_bytes: disk.once(buffer.evict_released, num_bytes, saved_step=saved_step)),
        ("old logs", lambda num_bytes: in_background(_remove_first, old_logs, num_bytes)),
        ("old events", lambda num_bytes: _remove_old_events(home, num_bytes)),
        ("old checkpoints", lambda _: in_background(_remove_old_checkpoints, home)),
    )
    for what, remove in steps:
        before = (await measure()).used_bytes
        if before <= target_bytes:
            return
        try:
            await remove(before - target_bytes)
        except (OSError, sqlite3.OperationalError) as error:  # SQLite needs a little space to give back more
            if not is_disk_full(error, home.root):
                raise
        if (freed_bytes := before - (await measure()).used_bytes) > 0:
            yield what, freed_bytes


def rotate_logs(home: Home, *, max_bytes: int) -> None:
    """Rotate the log files of the home that are too long. Raise OSError."""
    for path in home.logs.glob("*.log"):
        rotate_log(path, max_bytes=max_bytes)


async def _remove_old_events(home: Home, num_bytes: int) -> None:
    """Remove the oldest event logs, so that the rest is contiguous. Run in the event loop, which also rotates them."""
    _remove_first((path for path in event_log_files(home.events) if path != home.events), num_bytes)


def _remove_first(paths: Iterator[Path], num_bytes: int) -> None:
    for path in paths:
        if num_bytes <= 0:
            return
        num_bytes -= path.stat().st_size
        path.unlink()


def _remove_old_checkpoints(home: Home) -> None:
    for path in home.checkpoints.glob(f"{DAMAGED_PREFIX}*"):
        shutil.rmtree(path)
    keep_newest(home.checkpoints, CHECKPOINT_PREFIX, keep=1)


def rotate_log(path: Path, *, max_bytes: int) -> None:
    """Move the content of `path` to `<name>.1`, replacing that file, if it has `max_bytes` or more.

    On a full disk the content is lost instead. Raise OSError.
    """
    if not path.is_file() or path.stat().st_size < max_bytes:
        return
    older = path.with_name(f"{path.name}.1")
    older.unlink(missing_ok=True)  # before the copy, so that there are never three files
    try:
        shutil.copyfile(path, older)
    except OSError as error:
        older.unlink(missing_ok=True)
        if not is_disk_full(error, path.parent):
            raise
    os.truncate(path, 0)
