"""The re-announce loop: own groups that nobody confirmed are announced again, ever more rarely, while they are fresh.

consumes: own announcements, confirmations     produces: announcements
waits for: the clock                           unblocked by: time

Confirmations are not kept: after a start what is still READY counts as announced once and confirmed by nobody. A peer
that holds a group which is announced again confirms it again (announcements.py), so no lost confirmation holds a slot.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ftis_node.errors import RecordError
from ftis_node.node.peers.announce import announce, announcement_of
from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.records.envelope import open_envelope
from ftis_node.swarm.peer_guard import Place

if TYPE_CHECKING:
    from ftis_node.node.context import Parts

PERIOD_S = 1.0
MAX_CHECKED = 8  # claims of different peers, at the same time
CHECK_S = 3.0


class ReannounceLoop:
    """One look a second; nothing is said to an empty swarm."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._former: set[bytes] = set()  # READY since a former life, and not announced in this one yet

    async def run(self) -> None:
        """Until cancelled."""
        self._former.update(self._parts.reader.own_ready())
        for group_id in self._former:
            self._parts.confirmations.pending.announced(group_id, now=-math.inf)
        while True:
            with waiting_for("the clock"):
                await asyncio.sleep(PERIOD_S)
            await self._check_claims()
            if await self._parts.gossip.members():
                await self._announce_again()

    async def _check_claims(self) -> None:
        """Confirmations of peers to which the group was not sent in this life; they count where it is fetched back."""
        claims = self._parts.confirmations.unverified.take(MAX_CHECKED)
        await asyncio.gather(*(self._check(peer_id, group_id) for peer_id, group_id in claims))

    async def _check(self, peer_id: str, group_id: bytes) -> None:
        parts = self._parts
        if group_id in parts.confirmations.confirmed_ids or parts.reader.held(group_id) is None:
            return
        with parts.gossip.guard.work_for(peer_id, Place.CONFIRM):
            with waiting_for("a group that a peer claims to hold"):
                fetched = await parts.gossip.fetch(peer_id, [group_id], timeout_s=CHECK_S)
            if not any(_is_body(data, group_id) for data in fetched.bodies):
                parts.counters.confirmations_unproven += 1
            elif parts.confirmations.confirm(peer_id, group_id):
                parts.events.write("confirmed", group=group_id, peer=peer_id)

    async def _announce_again(self) -> None:
        parts = self._parts
        for due in parts.confirmations.pending.due(now=time.monotonic()):
            held = parts.reader.held(due.group_id)
            if held is None:
                continue
            announcement = replace(announcement_of(parts, held), attempt=due.attempt)
            if announcement.created_at < time.time() - parts.manifest.step.max_age_s:
                parts.confirmations.pending.confirmed(due.group_id)  # nobody has a use for it any more
            elif await announce(parts, announcement):
                parts.counters.groups_sent += due.group_id in self._former
                self._former.discard(due.group_id)
                parts.events.write("reannounced", group=due.group_id, attempt=due.attempt)


def _is_body(data: bytes, group_id: bytes) -> bool:
    try:
        return open_envelope(data).id == group_id
    except RecordError:
        return False
