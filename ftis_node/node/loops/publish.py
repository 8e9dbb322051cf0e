"""Own groups from their reward to their delivery, by three loops.

**Publish** numbers and signs a scored group, submits it to validation, and announces it. The group is on disk before it
is announced, so that every peer that requests it gets it. Sequence numbers are consecutive within an epoch, and only
groups that pass validation get one. So a gap always means that announcements were lost. An epoch without a free number
is followed by the next one. A small group's announcement, pull and confirmation cost more than its envelope. So the
following small groups wait for the end of a short window, and one message announces them all. An idle node announces
at once.

**Re-announce** repeats the announcements of unconfirmed groups, with growing pauses, while they are fresh. A restart
loses the confirmations. After it, each READY group counts as announced once and not confirmed. A peer that holds a
group confirms each repeated announcement (announcements.py). So a lost confirmation does not block a slot.

**Deliver** replaces the train loop in a node that does not learn: it frees the slot of a group that a peer has
confirmed. Learners pull only groups that they will use. So a generator makes as many groups as learners pull, plus one
for each slot. If no learner pulls a group, it becomes stale and its slot is free again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass, field, replace

from ftis_node.errors import FtisError, RecordError
from ftis_node.node.loops.intake import IntakeLoop
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.peers.request_handler import announcement_of
from ftis_node.node.storage.number_epochs import begin_epoch
from ftis_node.node.supervision.task_monitor import sleep, waiting
from ftis_node.node.training.generation_slots import SlotPool
from ftis_node.records.bounds import MAX_MORE_GROUPS
from ftis_node.records.envelope import Announcement, announce_group, join_announcements, open_envelope, seal_group
from ftis_node.records.group import Group
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.rate_limits import TokenBucket
from ftis_node.swarm.sequence import MAX_COUNTER, counter_of
from ftis_node.validation import Accepted, ValidationResult

log = logging.getLogger(__name__)
WINDOW_S = 0.5
SMALL_BYTES = 1 << 14  # a larger envelope outweighs its announcement and goes at once
VALIDATION = "validation of own groups"
REANNOUNCE_PERIOD_S = 1.0
MAX_ANNOUNCED_AGAIN = 4  # times, if no peer confirms the group
MAX_CHECKED = 8  # unverified confirmations of different peers, checked concurrently
REANNOUNCE_CHECK_S = 3.0
DELIVERY_PERIOD_S = 0.2


@dataclass(eq=False, repr=False)
class PublishLoop(NodePart):
    """Loop that publishes one own group at a time."""

    scored: asyncio.Queue[Group]
    intake: IntakeLoop
    slots: SlotPool

    def __post_init__(self) -> None:
        self.last_number = self.store.buffer.last_number()
        self._window = TokenBucket(rate_per_s=1 / WINDOW_S, burst=1.0)
        self._gathered: list[Announcement] = []
        self._has_gathered = asyncio.Event()
        self._num_begun = 0  # groups in validation, gathered, or in an announcement under way

    @property
    def num_unannounced(self) -> int:
        """Return the number of scored groups that are not announced yet."""
        return self.scored.qsize() + self._num_begun

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish_all(), name="publish-groups")
            tasks.create_task(self._announce_gathered(), name="publish-announce")

    async def _publish_all(self) -> None:
        while True:
            await self.publish(await waiting("a scored group", self.scored.get()))

    async def publish(self, group: Group) -> ValidationResult:
        """Publish a scored group that holds a slot, and return its verdict. One call at a time."""
        self._num_begun += 1  # until it is announced or refused
        if counter_of(self.last_number) == MAX_COUNTER:
            self.last_number = await self.store.disk(begin_epoch, self.store.home, self.store.buffer)
        group = replace(group, number=self.last_number + 1)
        envelope = seal_group(group, self.context.identity, codec=self.context.settings.swarm.codec)
        data = envelope.to_bytes()
        verdict = await waiting(
            "the validation verdict", self.intake.submit(data, origin=self.context.peer_id, made=group)
        )
        if not isinstance(verdict, Accepted):
            refusal = verdict.refusal
            if self.context.failures.failed(VALIDATION, FtisError(f"{refusal.reason}: {refusal.detail}")):
                log.error("an own group failed validation: %s", refusal.detail)
            self.slots.cancel()
            self._num_begun -= 1
            return verdict
        self.context.failures.succeeded(VALIDATION)
        self.last_number = group.number
        self.slots.fill()
        self._gathered.append(announce_group(envelope, group, envelope_bytes=len(data)))
        if self._may_wait(len(data)):
            self._has_gathered.set()
        else:
            await self._announce()
        return verdict

    def _may_wait(self, num_bytes: int) -> bool:
        """Return whether the gathered groups may wait for others: small, not a full message, and one went just now."""
        is_full = num_bytes > SMALL_BYTES or len(self._gathered) > MAX_MORE_GROUPS
        is_idle = not self._window.wait_s(1.0, now=time.monotonic())
        return not is_full and not is_idle

    async def _announce_gathered(self) -> None:
        while True:
            await waiting("a gathered announcement", self._has_gathered.wait())
            self._has_gathered.clear()
            await sleep(self._window.wait_s(1.0, now=time.monotonic()))
            await self._announce()

    async def _announce(self) -> None:
        """Announce the gathered groups in as few messages as possible."""
        gathered, self._gathered = self._gathered, []
        self._window.spend(1.0, now=time.monotonic())
        for announcement in join_announcements(gathered):
            if not await self.gossip.announce(announcement.to_bytes(), shard=self.context.shard):
                continue
            for one in (announcement, *announcement.more):
                self.peers.counters.groups_sent += 1
                self.peers.confirmations.pending.failed(one.id, now=time.monotonic())
                self.context.events.write("announced", group=one.id, number=one.number)
        self._num_begun -= len(gathered)


@dataclass(eq=False, repr=False)
class ReannounceLoop(NodePart):
    """Loop that runs once a second. It announces nothing if no member is connected."""

    _former: set[bytes] = field(default_factory=set, init=False)  # READY since an earlier start, not announced since

    async def run(self) -> None:
        self._former.update(self.store.reader.own_ready())
        for group_id in self._former:
            self.peers.confirmations.pending.failed(group_id, now=-math.inf)
        while True:
            await sleep(REANNOUNCE_PERIOD_S)
            claims = self.peers.confirmations.unverified.take(MAX_CHECKED)
            await asyncio.gather(*(self._check(peer_id, group_id) for peer_id, group_id in claims))
            if await self.gossip.members():
                await self._announce_again()

    async def _check(self, peer_id: str, group_id: bytes) -> None:
        """Check a confirmation of a group that this process did not send: fetch the group back from the peer."""
        if group_id in self.peers.confirmations.confirmed_ids or self.store.reader.held(group_id) is None:
            return
        with self.gossip.guard.work_for(peer_id, Place.CONFIRM):
            fetching = self.gossip.fetch(peer_id, [group_id], timeout_s=REANNOUNCE_CHECK_S)
            fetched = await waiting("a group that a peer claims to hold", fetching)
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
    """Loop that checks for confirmations several times a second."""

    slots: SlotPool

    async def run(self) -> None:
        while True:
            await self._release()
            await sleep(DELIVERY_PERIOD_S)

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
