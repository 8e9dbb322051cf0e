"""The publish loop: numbers and signs a scored group, submits it to validation, and announces it.

    consumes: scored groups (generate loop)     produces: envelopes to intake, announcements to peers
    waits for: a scored group                   unblocked by: the generate loop

A group is announced only after it is on disk, so that every peer that requests it gets it. Sequence numbers are
consecutive, and only groups that pass validation get one. So a gap always means that announcements were lost.

A small group's announcement, pull and confirmation cost more than its body. So the following
small groups wait for the end of a short window, and one message announces them all. An idle node announces at once, and
so does one with a member that reads no batches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.records.bounds import MAX_MORE_GROUPS
from ftis_node.records.envelope import announce_group, join_announcements, seal_group
from ftis_node.swarm.token_bucket import SendWindow
from ftis_node.validation import Accepted

if TYPE_CHECKING:
    from ftis_node.node.context import NodeContext, NodeCounters
    from ftis_node.node.loops.intake import IntakeLoop
    from ftis_node.node.peers.announce import Announcer, Confirmations
    from ftis_node.node.training.slots import SlotPool
    from ftis_node.records.envelope import Announcement
    from ftis_node.records.group import Group
    from ftis_node.validation import ValidationResult

log = logging.getLogger(__name__)

WINDOW_S = 0.5
SMALL_BYTES = 1 << 14  # a larger envelope outweighs its announcement and goes at once
ALL = "all"


class PublishLoop:
    """Loop that publishes one own group at a time."""

    def __init__(
        self,
        *,
        context: NodeContext,
        scored: asyncio.Queue[Group],
        intake: IntakeLoop,
        announcer: Announcer,
        slots: SlotPool,
        counters: NodeCounters,
        confirmations: Confirmations,
        last_number: int,
    ) -> None:
        """`last_number` is the last sequence number of this node's groups in the buffer."""
        self._context = context
        self._scored = scored
        self._intake = intake
        self._announcer = announcer
        self._slots = slots
        self._counters = counters
        self._confirmations = confirmations
        self._last_number = last_number
        self._window = SendWindow(window_s=WINDOW_S)
        self._gathered: list[Announcement] = []
        self._has_gathered = asyncio.Event()

    async def run(self) -> None:
        """Run until canceled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish_all(), name="publish-groups")
            tasks.create_task(self._announce_gathered(), name="publish-announce")

    async def _publish_all(self) -> None:
        while True:
            with waiting_for("a scored group"):
                group = await self._scored.get()
            await self.publish(group)

    async def publish(self, group: Group) -> ValidationResult:
        """Publish a scored group that holds a slot, and return its verdict. One call at a time."""
        group = replace(group, number=self._last_number + 1)
        envelope = seal_group(group, self._context.identity, codec=self._context.settings.swarm.codec)
        data = envelope.to_bytes()
        with waiting_for("the validation verdict"):  # queued behind groups of peers; the intake loop has time limits
            verdict = await self._intake.submit(data, origin=self._context.identity.peer_id, made=group)
        if not isinstance(verdict, Accepted):
            log.error("an own group failed validation: %s", verdict.refusal.detail)
            self._slots.cancel()
            return verdict
        self._last_number = group.number
        self._slots.fill()
        self._gathered.append(announce_group(envelope, group, envelope_bytes=len(data)))
        if await self._may_wait(len(data)):
            self._has_gathered.set()
        else:
            await self._announce()
        return verdict

    async def _may_wait(self, num_bytes: int) -> bool:
        """Return whether the gathered groups may wait for others: small, not a full message, and one went just now."""
        is_full = num_bytes > SMALL_BYTES or len(self._gathered) > MAX_MORE_GROUPS
        is_idle = not self._window.wait_s(ALL, now=time.monotonic())
        return not is_full and not is_idle and await self._announcer.may_batch()

    async def _announce_gathered(self) -> None:
        while True:
            with waiting_for("a gathered announcement"):
                await self._has_gathered.wait()
            self._has_gathered.clear()
            with waiting_for("the clock"):
                await asyncio.sleep(self._window.wait_s(ALL, now=time.monotonic()))
            await self._announce()

    async def _announce(self) -> None:
        """Announce the gathered groups, each alone if some member reads no batches."""
        gathered, self._gathered = self._gathered, []
        self._window.sent(ALL, now=time.monotonic())
        may_batch = len(gathered) > 1 and await self._announcer.may_batch()
        for announcement in join_announcements(gathered) if may_batch else gathered:
            if not await self._announcer.announce(announcement):
                continue
            for one in (announcement, *announcement.more):
                self._counters.groups_sent += 1
                self._confirmations.pending.announced(one.id, now=time.monotonic())
                self._context.events.write("announced", group=one.id, number=one.number)
