"""The loop that sends confirmations of accepted groups.

A confirmation goes to the sender of accepted groups, with the ids of the groups that this node stores.
The first ones to a sender go at once. Under load those of half a second go together in one message. At most one
is in flight to each sender, and senders that answer slowly delay only one another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ftis_node.gossip import Gossip
from ftis_node.node.peers.announcements import AnnouncementHandler
from ftis_node.node.peers.outgoing_slots import QuerySlots
from ftis_node.node.supervision.background import wait_at_most
from ftis_node.swarm.rate_limits import TokenBuckets
from ftis_node.validation import Accepted, ValidationResult

log = logging.getLogger(__name__)

BURST = 4  # to one sender at once: a node that ends after a few groups has its confirmations
WINDOW_S = 0.5  # no peer waits for a confirmation; a repeated announcement is due after 10 s
MAX_SENDERS = 256  # with a send window
MAX_SENDING = 8  # confirmations in flight to senders of one pace
MAX_IDS = 64  # in one message


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
