"""The deliver loop: it frees the slots of a generator's own groups once a peer has confirmed them.

It replaces the train loop in a node that does not learn: a generator or an exchange node. Learners pull only groups
that they will use. So a generator makes as many groups as learners pull, plus one for each slot. If no learner pulls a
group, it becomes stale and its slot is free again.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftis_node.node.context import NodeContext
from ftis_node.node.peers.manager import PeerManager
from ftis_node.node.storage.node_store import Store
from ftis_node.node.supervision.task_monitor import pause
from ftis_node.node.training.group_limits import SlotPool
from ftis_node.replay.lifecycle import ReleaseReason

POLL_INTERVAL_S = 0.2


@dataclass(eq=False, repr=False)
class DeliverLoop:
    """Loop that checks for confirmations several times a second."""

    context: NodeContext
    store: Store
    slots: SlotPool
    peers: PeerManager

    async def run(self) -> None:
        while True:
            await self._release()
            await pause(POLL_INTERVAL_S)

    async def _release(self) -> None:
        delivered = await self.store.disk(
            self.store.buffer.release_delivered, self.peers.confirmations.confirmed_ids.keys()
        )
        for group in delivered:
            self.context.events.write("released", group=group.id, reason=ReleaseReason.DELIVERED)
        if await self.store.release_stale() or delivered:
            await self.store.disk(self.store.buffer.prune, max_disk_bytes=self.context.settings.buffer.max_disk_bytes)
            self.slots.set_held(self.store.reader.own_held())
