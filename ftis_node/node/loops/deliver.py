"""Frees the slot of a group that a peer has confirmed, in a node that does not learn.

Learners pull only groups that they will use. So a generator makes as many groups as learners pull, plus one for each
slot. If no learner pulls a group, it becomes stale and its slot is free again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.training.generation_slots import SlotPool
from ftis_node.replay.lifecycle import ReleaseReason

DELIVERY_PERIOD_S = 0.2


@dataclass(eq=False, repr=False)
class DeliverLoop(NodePart):
    """Loop that checks for confirmations several times a second."""

    slots: SlotPool

    async def run(self) -> None:
        while True:
            await self._release()
            await asyncio.sleep(DELIVERY_PERIOD_S)

    async def _release(self) -> None:
        delivered = await self.store.disk(
            self.store.buffer.release_delivered, self.peers.confirmations.confirmed_ids.keys()
        )
        for group in delivered:
            self.context.events.write("released", group=group.id, reason=ReleaseReason.DELIVERED)
        if await self.store.release_stale() or delivered:
            await self.store.disk(self.store.buffer.prune, max_disk_bytes=self.context.settings.buffer.max_disk_bytes)
            self.slots.set_held(self.store.reader.own_held())
