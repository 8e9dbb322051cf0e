"""Periodic work: the peers loop saves peers and bounds the buffer, the disk space loop keeps the home within its limit.

Groups also arrive during a long training step, so the peers loop enforces the buffer's bounds in memory and on disk.

The disk space loop rotates logs, reclaims space in a nearly full home, and pauses the node while the home is full.
Generation and pulling wait on `DiskSpace`. During a pause the node trains on the groups in its buffer and serves peers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from ftis_node.config.limits import LOG_FILE_BYTES
from ftis_node.node.context import NodeContext
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.storage.cleanup import reclaim, rotate_logs
from ftis_node.node.storage.disk_space import HomeUse, measure_usage
from ftis_node.node.storage.node_store import Store
from ftis_node.node.supervision.background import in_background
from ftis_node.telemetry.clock import SleepDetector, SteadyClock
from ftis_node.telemetry.health_summary import duration
from ftis_node.telemetry.terminal_text import size

log = logging.getLogger(__name__)

PEERS_PERIOD_S = 1.0
PERIODS_PER_SAVE = 10
DISK_PERIOD_S = 2.0


@dataclass(eq=False, repr=False)
class PeersLoop(NodePart):
    """Loop with two periods: it checks buffer and clocks every second, and saves `peers.sqlite` every ten seconds.

    `on_wake` is called after the machine slept.
    """

    on_wake: Callable[[], None]
    _clock: SteadyClock = field(default_factory=SteadyClock, init=False)
    _sleep: SleepDetector = field(default_factory=SleepDetector, init=False)

    async def run(self) -> None:
        while True:
            for peer in await self.gossip.connected_peers():
                self.peers.note_addresses(peer.peer_id, peer.addresses)
            self.peers.save()
            for _ in range(PERIODS_PER_SAVE):
                await self.store.enforce_bounds(self.peers.share_cap())
                self._note_jump()
                self._note_sleep()
                await asyncio.sleep(PEERS_PERIOD_S)

    def _note_jump(self) -> None:
        """Log a jump of the machine's clock, because validation compares the times that peers send with it."""
        if (jump_s := self._clock.jump_s()) is None:
            return
        log.warning("this machine's clock was moved by %+.0f s", jump_s)
        self.context.events.write("clock_moved", jump_s=round(jump_s, 1))

    def _note_sleep(self) -> None:
        """After a suspended machine or process continues, let the node renew what expired meanwhile."""
        if (slept_s := self._sleep.slept_s(period_s=PEERS_PERIOD_S)) is None:
            return
        log.info("this machine or process was suspended for %s: the node continues", duration(slept_s))
        self.context.events.write("woke", slept_s=round(slept_s, 1))
        self.peers.forget_refusals()
        self.on_wake()


@dataclass(eq=False, repr=False)
class DiskSpaceLoop:
    """Loop that measures the home every few seconds, and reclaims space if too little is free."""

    context: NodeContext
    store: Store

    def __post_init__(self) -> None:
        self._reported = ""

    async def run(self) -> None:
        """Run until canceled. Raise OSError for a home that cannot be read."""
        while True:
            await self.check()
            await asyncio.sleep(DISK_PERIOD_S)

    async def check(self) -> None:
        """Rotate long logs, remove files if the disk is nearly full, report its use."""
        space = self.store.space
        await in_background(rotate_logs, self.store.home, max_bytes=LOG_FILE_BYTES)
        use = await self._use()
        if missing_bytes := space.limit.missing_bytes(use):
            reclaimed = reclaim(missing_bytes, store=self.store, learns=self.context.settings.learns, measure=self._use)
            async for what, num_bytes in reclaimed:
                log.debug("removed %s to free disk space: %s", what, size(num_bytes))
                self.context.events.write("disk_reclaimed", what=what, num_bytes=num_bytes)
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
        self.context.events.write(change, reason=why_full, used_bytes=use.used_bytes, free_bytes=use.free_bytes)
        if why_full:
            log.warning("paused: no generation and no pulls until there is disk space: %s", why_full)
        else:
            log.info("resumed: there is disk space again")
