"""Confirmations of accepted groups: the loop that sends them, and the deliver loop, which waits for those of peers.

A confirmation goes to the sender of accepted groups, with the ids of the groups that this node stores.
The first ones to a sender go at once. Under load those of half a second go together in one message. At most one of
these is in flight to each sender, and senders that answer slowly delay only one another.

The deliver loop frees the slots of a generator's own groups once a peer has confirmed them.
It replaces the train loop in a node that does not learn: a generator or an exchange node. Learners pull only groups
that they will use. So a generator makes as many groups as learners pull, plus one for each slot. If no learner pulls a
group, it becomes stale and its slot is free again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.node.loops.pull_slots import Pace, QuerySlots
from ftis_node.node.supervision.task_monitor import pause, waiting_for
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.swarm.delivery import ReconfirmQueue
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.rate_limits import SendWindow
from ftis_node.validation import Accepted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.gossip import Gossip
    from ftis_node.node.context import NodeContext
    from ftis_node.node.loops.announcements import AnnouncementHandler
    from ftis_node.node.peers.serve import Confirmations
    from ftis_node.node.supervision.background import DiskThread
    from ftis_node.node.training.group_limits import BufferLimits, SlotPool
    from ftis_node.replay.buffer import ReplayBuffer
    from ftis_node.replay.reader import ReplayReader
    from ftis_node.validation import ValidationResult

log = logging.getLogger(__name__)

BURST = 4  # to one sender at once: a node that ends after a few groups has its confirmations
WINDOW_S = 0.5  # no peer waits for a confirmation; a repeated announcement is due after 10 s
MAX_SENDING = 8  # confirmations in flight to senders of one pace
POLL_INTERVAL_S = 0.2


@dataclass(kw_only=True, eq=False, repr=False)
class ConfirmationLoop:
    """Sends confirmations: of new groups, and again for repeated announcements of stored groups."""

    announcements: AnnouncementHandler
    gossip: Gossip

    def __post_init__(self) -> None:
        self._window = SendWindow(window_s=WINDOW_S, burst=BURST)
        self._gathered = ReconfirmQueue()
        self._has_gathered = asyncio.Event()
        self._slots = QuerySlots(MAX_SENDING)
        self._sending: dict[str, Pace] = {}  # senders with a confirmation of one of the queues in flight

    async def run(self) -> None:
        """Send gathered confirmations, and confirm stored groups that are announced again, until canceled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send_gathered(tasks), name="confirm-gathered")
            tasks.create_task(self._confirm_again(tasks), name="confirm-again")

    async def _send_gathered(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            with waiting_for("a gathered confirmation"):
                await self._has_gathered.wait()
            await pause(WINDOW_S)
            self._has_gathered.clear()
            self._send_all(self._gathered, tasks)

    async def _confirm_again(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            with waiting_for("a group that is here already"):
                await self.announcements.reminded.wait()
            self.announcements.reminded.clear()
            self._send_all(self.announcements.reminders, tasks)

    def _send_all(self, queue: ReconfirmQueue, tasks: asyncio.TaskGroup) -> None:
        """Begin to send what waits in a queue, except to senders whose turn comes when another call has ended."""
        while (due := queue.take(lambda sender: self._slots.takes_turn(self._sending, sender))) is not None:
            tasks.create_task(self._send_in_turn(queue, *due), name=f"confirm-{due[0][-6:]}")

    async def _send_in_turn(self, queue: ReconfirmQueue, sender: str, ids: Sequence[bytes]) -> None:
        """Send a confirmation. If that shows that the sender is slow, queue it again for a turn among slow ones."""
        began_at, is_sent = time.monotonic(), False
        limit_s = self._slots.limit_s(self._sending[sender])
        try:
            async with asyncio.timeout(limit_s):
                await self._send(sender, ids)
                is_sent = True
        except TimeoutError:
            log.debug("%s did not answer a confirmation in %g s", sender, limit_s)
        finally:
            was_slow = self._sending.pop(sender) is Pace.SLOW
            self._slots.note(sender, took_s=time.monotonic() - began_at, is_answered=is_sent)
        if not is_sent and not was_slow:
            for group_id in ids:
                queue.add(sender, group_id)
        self._has_gathered.set()
        self.announcements.reminded.set()

    async def confirm(self, verdicts: Sequence[ValidationResult], *, source: str) -> None:
        """Send each sender the ids of its accepted groups. `source` is the peer that sent the bodies."""
        accepted: dict[str, list[Accepted]] = defaultdict(list)
        for verdict in verdicts:
            if isinstance(verdict, Accepted):
                accepted[verdict.group.sender].append(verdict)
        reachable = {source, *await self.gossip.members()} if accepted else set()
        for sender, groups in accepted.items():
            with self.gossip.guard.work_for(sender, Place.CONFIRM):
                self._note_numbers(sender, groups)
                if sender in reachable and (rest := self._gather(sender, [group.announced_id for group in groups])):
                    await self._send(sender, rest)

    def _note_numbers(self, sender: str, groups: Sequence[Accepted]) -> None:
        tracker = self.announcements.tracker_of(sender)
        for accepted in groups:
            tracker.note(accepted.group.number, at=time.monotonic())

    def _gather(self, sender: str, ids: Sequence[bytes]) -> Sequence[bytes]:
        """Gather the ids if a confirmation to `sender` went a moment ago; return those to send at once."""
        if not self._window.wait_s(sender, now=time.monotonic()):
            return ids
        self._has_gathered.set()
        return [group_id for group_id in ids if not self._gathered.add(sender, group_id)]

    async def _send(self, sender: str, ids: Sequence[bytes]) -> None:
        with self.gossip.guard.work_for(sender, Place.CONFIRM):
            self._window.sent(sender, now=time.monotonic())
            if not await self.gossip.confirm(sender, ids):
                log.debug("%s rejected the confirmation of %d groups", sender, len(ids))


@dataclass(kw_only=True, eq=False, repr=False)
class DeliverLoop:
    """Loop that checks for confirmations several times a second."""

    context: NodeContext
    buffer: ReplayBuffer
    reader: ReplayReader
    disk: DiskThread
    slots: SlotPool
    limits: BufferLimits
    confirmations: Confirmations

    async def run(self) -> None:
        while True:
            await self._release()
            await pause(POLL_INTERVAL_S)

    async def _release(self) -> None:
        delivered = await self.disk(self.buffer.release_delivered, self.confirmations.confirmed_ids.keys())
        for group in delivered:
            self.context.events.write("released", group=group.id, reason=ReleaseReason.DELIVERED)
        if await self.limits.release_stale() or delivered:
            await self.disk(self.buffer.prune, max_disk_bytes=self.context.settings.buffer.max_disk_bytes)
            self.slots.set_held(self.reader.own_held())
