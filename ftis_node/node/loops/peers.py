"""The peers loop: the housekeeping that no announcement or envelope sets off.

consumes: the connected peers' addresses     produces: `peers.sqlite`; room in a buffer that is too full
waits for: the clock                         unblocked by: time

A learner's step may take long, and groups come in meanwhile: the buffer's bounds hold between steps too,
in memory and on disk.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.node.training.step_gate import evict_foreign
from ftis_node.swarm.peer_guard import Place
from ftis_node.telemetry.clock import SteadyClock

if TYPE_CHECKING:
    from ftis_node.node.context import Parts

log = logging.getLogger(__name__)

PERIOD_S = 1.0
PERIODS_PER_SAVE = 10


class PeersLoop:
    """Two clocks: the buffer is looked at every second, the book of peers is saved every ten."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._clock = SteadyClock()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            for peer in await self._parts.gossip.connected_peers():
                with self._parts.guard.work_for(peer.peer_id, Place.PRESENCE):
                    self._parts.peers.saw(peer.peer_id, peer.addresses)
            self._parts.peers.save()
            for _ in range(PERIODS_PER_SAVE):
                await self._make_room()
                self._note_jump()
                with waiting_for("the clock"):
                    await asyncio.sleep(PERIOD_S)

    def _note_jump(self) -> None:
        """What others say of time is held against this machine's clock: where that was moved, the log says when."""
        if (jump_s := self._clock.jump_s()) is None:
            return
        log.warning("this machine's clock was moved by %+.0f s", jump_s)
        self._parts.events.write("clock_moved", jump_s=round(jump_s, 1))

    async def _make_room(self) -> None:
        limits, reader = self._parts.settings.buffer, self._parts.reader
        _, foreign_ready = reader.ready_counts()
        if foreign_ready > limits.max_ready_groups or reader.ready_foreign_bytes() > limits.max_ready_bytes:
            await evict_foreign(self._parts)
        await self._prune()

    async def _prune(self) -> None:
        """What came and went between two steps does not wait for the next one, which a broken worker may never do."""
        parts = self._parts
        max_disk_bytes = parts.settings.buffer.max_disk_bytes
        if parts.reader.kept_bytes() > max_disk_bytes:
            saved_step = parts.state.saved_step
            await parts.disk(parts.buffer.prune, max_disk_bytes=max_disk_bytes, saved_step=saved_step)
