"""The publish loop: numbers and signs a scored group, submits it to validation, and announces it.

    consumes: scored groups (generate loop)     produces: envelopes to intake, announcements to peers
    waits for: a scored group                   unblocked by: the generate loop

A group is announced only after it is on disk, so that every peer that requests it gets it. Sequence numbers are
consecutive, and only groups that pass validation get one. So a gap always means that announcements were lost.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.records.envelope import announce_group, seal_group
from ftis_node.validation import Accepted

if TYPE_CHECKING:
    import asyncio

    from ftis_node.node.context import NodeContext
    from ftis_node.node.loops.intake import IntakeLoop
    from ftis_node.node.peers.announce import Announcer
    from ftis_node.node.peers.confirmations import Confirmations
    from ftis_node.node.state import NodeCounters
    from ftis_node.node.training.slots import SlotPool
    from ftis_node.records.group import Group

log = logging.getLogger(__name__)


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

    async def run(self) -> None:
        """Run until canceled."""
        while True:
            with waiting_for("a scored group"):
                group = await self._scored.get()
            await self._publish(group)

    async def _publish(self, group: Group) -> None:
        group = replace(group, number=self._last_number + 1)
        envelope = seal_group(group, self._context.identity, codec=self._context.settings.swarm.codec)
        data = envelope.to_bytes()
        with waiting_for("the validation verdict"):  # queued behind groups of peers; the intake loop has time limits
            verdict = await self._intake.submit(data, origin=self._context.identity.peer_id, made=group)
        if not isinstance(verdict, Accepted):
            log.error("an own group failed validation: %s", verdict.refusal.detail)
            self._slots.cancel()
            return
        self._last_number = group.number
        self._slots.fill()
        if await self._announcer.announce(announce_group(envelope, group, envelope_bytes=len(data))):
            self._counters.groups_sent += 1
            self._confirmations.pending.announced(envelope.id, now=time.monotonic())
            self._context.events.write("announced", group=envelope.id, number=group.number)
