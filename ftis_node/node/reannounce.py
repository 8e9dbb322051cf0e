"""The re-announce loop: own groups that nobody confirmed are announced again, ever more rarely, while they are fresh.

consumes: own announcements, confirmations     produces: announcements
waits for: the clock                           unblocked by: time

Confirmations are not kept: after a start what is still READY counts as announced once and confirmed by nobody. A peer
that holds a group which is announced again confirms it again (hear.py), so no lost confirmation holds a slot.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ftis_node.node.announce import announce, announcement_of
from ftis_node.node.waits import waiting_for

if TYPE_CHECKING:
    from ftis_node.node.parts import Parts

PERIOD_S = 1.0


class ReannounceLoop:
    """One look a second; nothing is said to an empty swarm."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._former: set[bytes] = set()  # READY since a former life, and not announced in this one yet

    async def run(self) -> None:
        """Until cancelled."""
        self._former.update(self._parts.reader.own_ready())
        for group_id in self._former:
            self._parts.figures.unconfirmed.announced(group_id, now=-math.inf)
        while True:
            with waiting_for("the clock"):
                await asyncio.sleep(PERIOD_S)
            if await self._parts.gossip.members():
                await self._announce_again()

    async def _announce_again(self) -> None:
        parts = self._parts
        for due in parts.figures.unconfirmed.due(now=time.monotonic()):
            held = parts.reader.held(due.group_id)
            if held is None:
                continue
            announcement = replace(announcement_of(parts, held), attempt=due.attempt)
            if announcement.created_at < time.time() - parts.manifest.step.max_age_s:
                parts.figures.unconfirmed.confirmed(due.group_id)  # nobody has a use for it any more
            elif await announce(parts, announcement):
                parts.figures.groups_sent += due.group_id in self._former
                self._former.discard(due.group_id)
                parts.events.write("announced_again", group=due.group_id, attempt=due.attempt)
