"""The disk space loop: rotates logs, reclaims space in a nearly full home, and pauses the node while the home is full.

consumes: the home's files     produces: rotated logs, the event log's snapshot, reclaimed space, an open or closed
                               `DiskSpace`
waits for: the clock           unblocked by: time

Generation and pulling wait on `DiskSpace`. During a pause the node trains on the groups in its buffer and serves peers.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ftis_node.node.storage.cleanup import reclaim, rotate_logs
from ftis_node.node.storage.event_log_snapshot import EventLogSnapshot
from ftis_node.node.storage.usage import HomeUse, measure_usage
from ftis_node.node.supervision.background import in_background
from ftis_node.telemetry.terminal_text import size

if TYPE_CHECKING:
    from ftis_node.config.home import Home
    from ftis_node.node.context import NodeContext
    from ftis_node.node.storage.usage import DiskSpace
    from ftis_node.node.supervision.background import DiskThread
    from ftis_node.replay.buffer import ReplayBuffer

log = logging.getLogger(__name__)

PERIOD_S = 2.0


class DiskSpaceLoop:
    """Loop that measures the home every few seconds, and reclaims space if too little is free."""

    def __init__(
        self,
        *,
        context: NodeContext,
        home: Home,
        space: DiskSpace,
        buffer: ReplayBuffer,
        disk: DiskThread,
        period_s: float = PERIOD_S,
    ) -> None:
        self._context = context
        self._home = home
        self._space = space
        self._buffer = buffer
        self._disk = disk
        self._period_s = period_s
        self._snapshot = EventLogSnapshot(home)
        self._reported = ""

    async def run(self) -> None:
        """Run until canceled. Raise OSError for a home that cannot be read."""
        while True:
            await self.check()
            await asyncio.sleep(self._period_s)

    async def check(self) -> None:
        """Rotate long logs, renew the event log's snapshot, remove files if the disk is nearly full, report its use."""
        space = self._space
        await in_background(rotate_logs, self._home, max_bytes=self._context.settings.limits.log_file_bytes)
        await in_background(self._snapshot.renew_if_due)
        use = await self._use()
        if missing_bytes := space.limit.missing_bytes(use):
            reclaimed = reclaim(
                missing_bytes,
                home=self._home,
                buffer=self._buffer,
                disk=self._disk,
                learns=self._context.settings.learns,
                measure=self._use,
            )
            async for what, num_bytes in reclaimed:
                log.debug("removed %s to free disk space: %s", what, size(num_bytes))
                self._context.events.write("disk_reclaimed", what=what, num_bytes=num_bytes)
            use = await self._use()
        space.note(use)
        self._report(use)

    async def _use(self) -> HomeUse:
        keep = self._context.settings.learner.keep_checkpoints
        return await in_background(measure_usage, self._home, keep_checkpoints=keep)

    def _report(self, use: HomeUse) -> None:
        """Log and record when the node pauses, and when it continues."""
        why_full = self._space.why_full
        if bool(why_full) == bool(self._reported):
            return
        self._reported = why_full
        change = "paused" if why_full else "resumed"
        self._context.events.write(change, reason=why_full, used_bytes=use.used_bytes, free_bytes=use.free_bytes)
        if why_full:
            log.warning("paused: no generation and no pulls until there is disk space: %s", why_full)
        else:
            log.info("resumed: there is disk space again")
