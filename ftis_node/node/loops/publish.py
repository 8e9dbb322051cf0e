"""Publishes own groups: numbers and signs a scored group, submits it to validation, and announces it.

The group is on disk before it is announced, so that every peer that requests it gets it. Sequence numbers are
consecutive within an epoch, and only groups that pass validation get one. So a gap always means that announcements were
lost. An epoch without a free number is followed by the next one.

A small group's announcement, pull and confirmation cost more than its envelope. So the following small groups wait for
the end of a short window, and one message announces them all. An idle node announces at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace

from ftis_node.errors import FtisError
from ftis_node.node.loops.intake import IntakeLoop
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.storage.node_store import begin_epoch
from ftis_node.node.training.generation_limits import SlotPool
from ftis_node.records.bounds import MAX_MORE_GROUPS
from ftis_node.records.envelope import Announcement, announce_group, join_announcements, seal_group
from ftis_node.records.group import Group
from ftis_node.swarm.rate_limits import TokenBucket
from ftis_node.swarm.sequence import MAX_COUNTER, counter_of
from ftis_node.validation import Accepted, ValidationResult

log = logging.getLogger(__name__)
WINDOW_S = 0.5
SMALL_BYTES = 1 << 14  # a larger envelope outweighs its announcement and goes at once
VALIDATION = "validation of own groups"


@dataclass(eq=False, repr=False)
class PublishLoop(NodePart):
    """Loop that publishes one own group at a time."""

    scored: asyncio.Queue[Group]
    intake: IntakeLoop
    slots: SlotPool
    may_gather: bool = True  # else each group is announced at once

    def __post_init__(self) -> None:
        self.last_number = self.store.buffer.last_number()
        self._window = TokenBucket(rate_per_s=1 / WINDOW_S, burst=1.0)
        self._gathered: list[Announcement] = []
        self._has_gathered = asyncio.Event()
        self._num_begun = 0  # groups in validation, gathered, or in an announcement under way

    @property
    def num_unannounced(self) -> int:
        return self.scored.qsize() + self._num_begun

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish_all(), name="publish-groups")
            tasks.create_task(self._announce_gathered(), name="publish-announce")

    async def _publish_all(self) -> None:
        while True:
            await self.publish(await self.scored.get())

    async def publish(self, group: Group) -> ValidationResult:
        """Publish a scored group that holds a slot, and return its verdict. One call at a time."""
        self._num_begun += 1  # until it is announced or refused
        if counter_of(self.last_number) == MAX_COUNTER:
            self.last_number = await self.store.disk(begin_epoch, self.store.home, self.store.buffer)
        group = replace(group, number=self.last_number + 1)
        envelope = seal_group(group, self.context.identity, codec=self.context.settings.swarm.codec)
        data = envelope.to_bytes()
        verdict = await self.intake.submit(data, origin=self.context.peer_id, made=group)
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
        return self.may_gather and not is_full and not is_idle

    async def _announce_gathered(self) -> None:
        while True:
            await self._has_gathered.wait()
            self._has_gathered.clear()
            await asyncio.sleep(self._window.wait_s(1.0, now=time.monotonic()))
            await self._announce()

    async def _announce(self) -> None:
        gathered, self._gathered = self._gathered, []
        self._window.spend(1.0, now=time.monotonic())
        for announcement in join_announcements(gathered):
            if not await self.gossip.announce(announcement.to_bytes(), shard=self.context.shard):
                continue
            for one in (announcement, *announcement.more):
                self.context.counters.groups_sent += 1
                if self.peers.confirmations.announced(one.id):
                    self.peers.confirmations.pending.failed(one.id, now=time.monotonic())
                self.context.events.write("announced", group=one.id, number=one.number)
        self._num_begun -= len(gathered)
