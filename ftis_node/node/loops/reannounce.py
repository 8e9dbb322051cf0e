"""The re-announce loop: repeats announcements of unconfirmed own groups, with growing pauses, while they are fresh.

    consumes: own announcements, confirmations     produces: announcements
    waits for: the clock                           unblocked by: time

A restart loses the confirmations. After it, each READY group counts as announced once and not confirmed. A peer that
holds a group confirms each repeated announcement (announcements.py). So a lost confirmation does not block a slot.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ftis_node.errors import RecordError
from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.records.envelope import open_envelope
from ftis_node.swarm.peer_guard import Place

if TYPE_CHECKING:
    from ftis_node.gossip.interface import Gossip
    from ftis_node.node.context import NodeContext, NodeCounters
    from ftis_node.node.peers.announce import Announcer, Confirmations
    from ftis_node.replay.reader import ReplayReader

PERIOD_S = 1.0
MAX_CHECKED = 8  # unverified confirmations of different peers, checked concurrently
CHECK_S = 3.0


class ReannounceLoop:
    """Loop that runs once a second. It announces nothing if no member is connected."""

    def __init__(
        self,
        *,
        context: NodeContext,
        announcer: Announcer,
        gossip: Gossip,
        reader: ReplayReader,
        counters: NodeCounters,
        confirmations: Confirmations,
    ) -> None:
        self._context = context
        self._announcer = announcer
        self._gossip = gossip
        self._reader = reader
        self._counters = counters
        self._confirmations = confirmations
        self._guard = gossip.guard
        self._former: set[bytes] = set()  # READY since an earlier start, and not announced since this start

    async def run(self) -> None:
        """Run until canceled."""
        self._former.update(self._reader.own_ready())
        for group_id in self._former:
            self._confirmations.pending.announced(group_id, now=-math.inf)
        while True:
            with waiting_for("the clock"):
                await asyncio.sleep(PERIOD_S)
            await self._check_claims()
            if await self._gossip.members():
                await self._announce_again()

    async def _check_claims(self) -> None:
        """Check confirmations of groups that this process did not send: fetch the group back from the peer."""
        claims = self._confirmations.unverified.take(MAX_CHECKED)
        await asyncio.gather(*(self._check(peer_id, group_id) for peer_id, group_id in claims))

    async def _check(self, peer_id: str, group_id: bytes) -> None:
        if group_id in self._confirmations.confirmed_ids or self._reader.held(group_id) is None:
            return
        with self._guard.work_for(peer_id, Place.CONFIRM):
            with waiting_for("a group that a peer claims to hold"):
                fetched = await self._gossip.fetch(peer_id, [group_id], timeout_s=CHECK_S)
            if not any(_is_body(data, group_id) for data in fetched.bodies):
                self._counters.confirmations_unproven += 1
            elif self._confirmations.confirm(peer_id, group_id):
                self._context.events.write("confirmed", group=group_id, peer=peer_id)

    async def _announce_again(self) -> None:
        for due in self._confirmations.pending.due(now=time.monotonic()):
            held = self._reader.held(due.group_id)
            if held is None:
                continue
            announcement = replace(self._announcer.announcement_of(held), attempt=due.attempt)
            if announcement.created_at < time.time() - self._context.manifest.step.max_age_s:
                self._confirmations.pending.confirmed(due.group_id)  # too old for every peer: stop announcing it
            elif await self._announcer.announce(announcement):
                self._counters.groups_sent += due.group_id in self._former
                self._former.discard(due.group_id)
                self._context.events.write("reannounced", group=due.group_id, attempt=due.attempt)


def _is_body(data: bytes, group_id: bytes) -> bool:
    try:
        return open_envelope(data).id == group_id
    except RecordError:
        return False
