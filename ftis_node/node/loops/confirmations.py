"""Confirmations: messages to the senders of accepted groups, with the ids of the groups that this node stores."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.swarm.peer_guard import Place
from ftis_node.validation import Accepted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.gossip.interface import Gossip
    from ftis_node.node.loops.announcements import AnnouncementHandler
    from ftis_node.validation import ValidationResult

log = logging.getLogger(__name__)


class ConfirmationLoop:
    """Sends confirmations: at once for new groups, and again for repeated announcements of stored groups."""

    def __init__(self, *, announcements: AnnouncementHandler, gossip: Gossip) -> None:
        self._announcements = announcements
        self._gossip = gossip
        self._guard = gossip.guard

    async def run(self) -> None:
        """Confirm stored groups that are announced again, until canceled."""
        while True:
            with waiting_for("a group that is here already"):
                await self._announcements.reminded.wait()
            self._announcements.reminded.clear()
            while (due := self._announcements.reminders.take()) is not None:
                await self._send(*due)

    async def confirm(self, verdicts: Sequence[ValidationResult], *, source: str) -> None:
        """Send each sender the ids of its accepted groups. `source` is the peer that sent the bodies."""
        checked: dict[str, list[bytes]] = defaultdict(list)
        for verdict in verdicts:
            if isinstance(verdict, Accepted):
                checked[verdict.group.sender].append(verdict.announced_id)
                self._announcements.tracker_of(verdict.group.sender).note(verdict.group.number, at=time.monotonic())
        reachable = {source, *await self._gossip.members()} if checked else set()
        for sender, ids in checked.items():
            if sender in reachable:
                await self._send(sender, ids)

    async def _send(self, sender: str, ids: Sequence[bytes]) -> None:
        with self._guard.work_for(sender, Place.CONFIRM):
            if not await self._gossip.confirm(sender, ids):
                log.debug("%s did not take the confirmation of %d groups", sender, len(ids))
