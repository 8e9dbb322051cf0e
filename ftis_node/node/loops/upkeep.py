"""The upkeep loop saves peers, bounds the buffer, and notes jumps of the clock and a suspended machine.

Groups also arrive during a long training step, so the loop enforces the buffer's bounds in memory and on disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from ftis_node.node.peers.node_part import NodePart
from ftis_node.telemetry.clock import SleepDetector, SteadyClock
from ftis_node.telemetry.health_summary import duration

log = logging.getLogger(__name__)

PEERS_PERIOD_S = 1.0
PERIODS_PER_SAVE = 10


@dataclass(eq=False, repr=False)
class UpkeepLoop(NodePart):
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
        self.peers.refusals.forget()
        self.on_wake()
