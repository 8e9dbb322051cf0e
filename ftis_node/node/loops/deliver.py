"""The deliver loop: frees the slots of a generator's own groups once a peer has them.

    consumes: confirmations of peers     produces: freed slots
    waits for: a confirmation; age       unblocked by: a learner that pulls, time

It replaces the train loop in a node that does not learn: a generator or an exchange node. Learners pull only groups
that they will use. So a generator makes as many groups as learners pull, plus one for each slot. If no learner pulls a
group, it becomes stale and its slot is free again.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.replay.lifecycle import Freshness, ReleaseReason

if TYPE_CHECKING:
    from ftis_node.node.context import NodeContext
    from ftis_node.node.peers.announce import Confirmations
    from ftis_node.node.supervision.background import DiskThread
    from ftis_node.node.training.slots import SlotPool
    from ftis_node.replay.buffer import ReplayBuffer
    from ftis_node.replay.reader import ReplayReader

POLL_INTERVAL_S = 0.2


class DeliverLoop:
    """Loop that checks for confirmations several times a second."""

    def __init__(
        self,
        *,
        context: NodeContext,
        buffer: ReplayBuffer,
        reader: ReplayReader,
        disk: DiskThread,
        slots: SlotPool,
        confirmations: Confirmations,
    ) -> None:
        self._context = context
        self._buffer = buffer
        self._reader = reader
        self._disk = disk
        self._slots = slots
        self._confirmations = confirmations

    async def run(self) -> None:
        """Run until canceled."""
        while True:
            await self._release()
            with waiting_for("the clock"):
                await asyncio.sleep(POLL_INTERVAL_S)

    async def _release(self) -> None:
        step = self._context.manifest.step
        freshness = Freshness(
            now=time.time(),
            max_age_s=step.max_age_s,
            policy_version=self._context.state.policy_version,
            max_version_lag=step.max_version_lag,
        )
        delivered = await self._disk(self._buffer.release_delivered, self._confirmations.confirmed_ids.keys())
        stale = await self._disk(self._buffer.release_stale, freshness)
        for groups, reason in ((delivered, ReleaseReason.DELIVERED), (stale, ReleaseReason.STALE)):
            for group in groups:
                self._context.events.write("released", group=group.id, reason=reason)
        if delivered or stale:
            await self._disk(self._buffer.prune, max_disk_bytes=self._context.settings.buffer.max_disk_bytes)
            self._slots.set_held(self._reader.own_held())
