"""Confirmations of groups: of peers' groups to their senders, and of own groups by peers.

A confirmation goes to the sender of accepted groups, with the ids of the groups that this node stores.
The first ones to a sender go at once. Under load those of half a second go together in one message. At most one
is in flight to each sender, and senders that answer slowly delay only one another.

Own groups without one are announced again, with growing pauses, while they are fresh. A restart loses the
confirmations. After it, each READY group counts as announced once and not confirmed. A peer that holds a group confirms
each repeated announcement (`announcements.py`). So a lost confirmation does not block a slot.

Learners pull only groups that they will use. So a generator makes as many groups as learners pull, plus one for each
slot. If no learner pulls a group, it becomes stale and its slot is free again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ftis_node.gossip import Gossip, GossipLimits
from ftis_node.node.peers.announcements import AnnouncementHandler
from ftis_node.node.peers.group_requests import announcement_of
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.peers.outgoing_slots import QuerySlots
from ftis_node.node.supervision.waits import wait_at_most
from ftis_node.node.training.generation_limits import SlotPool
from ftis_node.records.envelope import is_envelope_of
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.rate_limits import TokenBuckets
from ftis_node.validation import Accepted, ValidationResult

log = logging.getLogger(__name__)
BURST = 4  # to one sender at once: a node that ends after a few groups has its confirmations
WINDOW_S = 0.5  # no peer waits for a confirmation; a repeated announcement is due after 10 s
MAX_SENDERS = 256  # with a send window
MAX_SENDING = 8  # confirmations in flight to senders of one pace
MAX_IDS = GossipLimits().max_ids_per_request
REANNOUNCE_PERIOD_S = 1.0
MAX_ANNOUNCED_AGAIN = 4  # times, if no peer confirms the group
MAX_CHECKED = 8  # unverified confirmations of different peers, checked concurrently
REANNOUNCE_CHECK_S = 3.0
DELIVERY_PERIOD_S = 0.2


@dataclass(eq=False, repr=False)
class ConfirmationLoop:
    """Loop that sends confirmations: of new groups, and again for repeated announcements of stored groups."""

    announcements: AnnouncementHandler
    gossip: Gossip

    def __post_init__(self) -> None:
        self._window = TokenBuckets(rate_per_s=1 / WINDOW_S, burst=BURST, capacity=MAX_SENDERS)
        self._slots = QuerySlots(MAX_SENDING)
        self._queue, self._changed = self.announcements.to_confirm, self.announcements.has_to_confirm

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await wait_at_most(WINDOW_S if len(self._queue) else None, self._changed)
                self._changed.clear()
                while (due := self._queue.take_of_next(self._may_send, most=MAX_IDS)) is not None:
                    tasks.create_task(self._send(*due), name=f"confirm-{due[0][-6:]}")

    async def confirm(self, verdicts: Sequence[ValidationResult], *, source: str) -> None:
        """Queue confirmations to reachable senders of accepted groups. `source` is the peer that sent the envelopes."""
        accepted = [verdict for verdict in verdicts if isinstance(verdict, Accepted)]
        reachable = {source, *await self.gossip.members()} if accepted else set()
        for verdict in accepted:
            sender = verdict.group.sender
            self.announcements.tracker_of(sender).note(verdict.group.number, at=time.monotonic())
            if sender in reachable:
                self._queue.add(sender, verdict.announced_id)
        self._changed.set()

    def _may_send(self, sender: str) -> bool:
        """Take a slot for a message to a sender, and return True; return False if it has to wait."""
        is_open = self.gossip.guard.may_work(sender) and self._window.peek(sender).left(now=time.monotonic()) >= 1.0
        return is_open and self._slots.take(sender)

    async def _send(self, sender: str, ids: Sequence[bytes]) -> None:
        """Send a confirmation in the sender's slot. If that shows that the sender is slow, queue it once more."""
        began_at, is_answered, limit_s = time.monotonic(), False, self._slots.limit_s(sender)
        try:
            async with asyncio.timeout(limit_s):
                self._window.of(sender).spend(1.0, now=began_at)
                if not await self.gossip.confirm(sender, ids):
                    log.debug("%s refused the confirmation of %d groups", sender, len(ids))
                is_answered = True
        except TimeoutError:
            log.debug("%s did not answer a confirmation in %g s", sender, limit_s)
        finally:
            self._slots.note(sender, took_s=time.monotonic() - began_at, is_answered=is_answered)
            if self._slots.turned_slow(sender):
                for group_id in ids:
                    self._queue.add(sender, group_id)
            self._slots.release(sender)
            self._changed.set()


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
            if not any(is_envelope_of(data, group_id) for data in fetched.items):
                self.context.counters.confirmations_unproven += 1
            elif self.peers.confirmations.confirm(peer_id, group_id):
                self.context.events.write("confirmed", group=group_id, peer=peer_id)

    async def _announce_again(self) -> None:
        confirmations, now = self.peers.confirmations, time.monotonic()
        pending = confirmations.pending
        for group_id, attempt in pending.due(now=now):
            held, oldest = self.store.reader.held(group_id), time.time() - self.context.manifest.step.max_age_s
            is_confirmed, was_last = group_id in confirmations.confirmed_ids, attempt > MAX_ANNOUNCED_AGAIN
            if is_confirmed or was_last or held is None or held.created_at < oldest:
                pending.discard(group_id)  # confirmed while an earlier one was announced, or too old for every peer
                continue
            pending.failed(group_id, now=now)  # after the last announcement, too: peers need time to fetch the group
            announcement = replace(announcement_of(held, self.context.about), attempt=attempt)
            if await self.gossip.announce(announcement.to_bytes(), shard=self.context.shard):
                if group_id in self._former:
                    self._former.discard(group_id)
                    self.context.counters.groups_sent += 1
                    confirmations.announced(group_id)
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
