"""Delivery of own groups: repeated announcements of unconfirmed ones, and the slots of confirmed ones.

Unconfirmed groups are announced again, with growing pauses, while they are fresh. A restart loses the confirmations.
After it, each READY group counts as announced once and not confirmed. A peer that holds a group confirms each repeated
announcement (`announcements.py`). So a lost confirmation does not block a slot.

Learners pull only groups that they will use. So a generator makes as many groups as learners pull, plus one for each
slot. If no learner pulls a group, it becomes stale and its slot is free again.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field, replace

from ftis_node.errors import RecordError
from ftis_node.node.peers.group_requests import announcement_of
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.training.generation_slots import SlotPool
from ftis_node.records.envelope import open_envelope
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.swarm.peer_guard import Place

REANNOUNCE_PERIOD_S = 1.0
MAX_ANNOUNCED_AGAIN = 4  # times, if no peer confirms the group
MAX_CHECKED = 8  # unverified confirmations of different peers, checked concurrently
REANNOUNCE_CHECK_S = 3.0
DELIVERY_PERIOD_S = 0.2


@dataclass(eq=False, repr=False)
class ReannounceLoop(NodePart):
    """Loop that runs once a second. It announces nothing if no member is connected."""

    _former: set[bytes] = field(default_factory=set, init=False)  # READY since an earlier start, not announced since

    async def run(self) -> None:
        self._former.update(self.store.reader.own_ready())
        for group_id in self._former:
            self.peers.confirmations.pending.failed(group_id, now=-math.inf)
        while True:
            await asyncio.sleep(REANNOUNCE_PERIOD_S)
            claims = self.peers.confirmations.unverified.take(MAX_CHECKED)
            await asyncio.gather(*(self._check(peer_id, group_id) for peer_id, group_id in claims))
            if await self.gossip.members():
                await self._announce_again()

    async def _check(self, peer_id: str, group_id: bytes) -> None:
        """Check a confirmation of a group that this process did not send: fetch the group back from the peer."""
        if group_id in self.peers.confirmations.confirmed_ids or self.store.reader.held(group_id) is None:
            return
        with self.gossip.guard.work_for(peer_id, Place.CONFIRM):
            fetched = await self.gossip.fetch(peer_id, [group_id], timeout_s=REANNOUNCE_CHECK_S)
            if not any(_is_envelope_of(data, group_id) for data in fetched.items):
                self.peers.counters.confirmations_unproven += 1
            elif self.peers.confirmations.confirm(peer_id, group_id):
                self.context.events.write("confirmed", group=group_id, peer=peer_id)

    async def _announce_again(self) -> None:
        confirmations, now = self.peers.confirmations, time.monotonic()
        pending = confirmations.pending
        for group_id, attempt in pending.due(now=now):
            if group_id in confirmations.confirmed_ids:
                continue  # while an earlier one was announced
            held = self.store.reader.held(group_id)
            if held is None or held.created_at < time.time() - self.context.manifest.step.max_age_s:
                pending.discard(group_id)  # too old for every peer
                continue
            if attempt < MAX_ANNOUNCED_AGAIN:
                pending.failed(group_id, now=now)
            else:
                pending.discard(group_id)
            announcement = replace(announcement_of(held, self.context.about), attempt=attempt)
            if await self.gossip.announce(announcement.to_bytes(), shard=self.context.shard):
                self.peers.counters.groups_sent += group_id in self._former
                self._former.discard(group_id)
                self.context.events.write("reannounced", group=group_id, attempt=attempt)


@dataclass(eq=False, repr=False)
class DeliverLoop(NodePart):
    """Loop that frees the slots of confirmed groups, in a node that does not learn."""

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


def _is_envelope_of(data: bytes, group_id: bytes) -> bool:
    try:
        return open_envelope(data).id == group_id
    except RecordError:
        return False
