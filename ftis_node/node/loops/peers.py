"""The peers loop: periodic work on peers and buffer.

    consumes: the connected peers' addresses     produces: `peers.sqlite`; a buffer within its bounds
    waits for: the clock                         unblocked by: time

Groups also arrive during a long training step, so the loop enforces the buffer's bounds in memory and on disk.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.swarm.peer_guard import Place
from ftis_node.telemetry.clock import SteadyClock

if TYPE_CHECKING:
    from ftis_node.gossip.interface import Gossip
    from ftis_node.node.peers.manager import PeerManager
    from ftis_node.node.training.buffer_limits import BufferLimits
    from ftis_node.telemetry.events import EventLog

log = logging.getLogger(__name__)

PERIOD_S = 1.0
PERIODS_PER_SAVE = 10


class PeersLoop:
    """Loop with two periods: it checks the buffer every second, and saves `peers.sqlite` every ten seconds."""

    def __init__(self, *, events: EventLog, gossip: Gossip, peers: PeerManager, limits: BufferLimits) -> None:
        self._events = events
        self._gossip = gossip
        self._peers = peers
        self._limits = limits
        self._guard = gossip.guard
        self._clock = SteadyClock()

    async def run(self) -> None:
        """Run until canceled."""
        while True:
            for peer in await self._gossip.connected_peers():
                with self._guard.work_for(peer.peer_id, Place.PRESENCE):
                    self._peers.note_addresses(peer.peer_id, peer.addresses)
            self._peers.save()
            for _ in range(PERIODS_PER_SAVE):
                await self._limits.enforce()
                self._note_jump()
                with waiting_for("the clock"):
                    await asyncio.sleep(PERIOD_S)

    def _note_jump(self) -> None:
        """Log a jump of the machine's clock, because validation compares the times that peers send with it."""
        if (jump_s := self._clock.jump_s()) is None:
            return
        log.warning("this machine's clock was moved by %+.0f s", jump_s)
        self._events.write("clock_moved", jump_s=round(jump_s, 1))
