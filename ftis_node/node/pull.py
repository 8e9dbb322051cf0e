"""The pull loop: announcements of peers become envelopes at the door.

consumes: announcements; members that are new     produces: envelopes to intake, confirmations to their senders
waits for: an announcement                        unblocked by: gossip

Bodies are pulled once, from the announcing peer, several in one request. Gossipsub loses messages without an error:
before its mesh stands, and when a reader is slow. So a peer is asked for what it made lately when it is first seen,
when its running numbers show a gap, and when the learner waits for foreign groups and nothing comes.

Where the run says so, a group of another tokenizer is pulled as text; only its sender can tell it so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ftis_node.errors import RecordError
from ftis_node.gossip.base import FetchOutcome
from ftis_node.records.envelope import open_announcement
from ftis_node.validation import Accepted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftis_node.node.intake import IntakeLoop
    from ftis_node.node.parts import Parts
    from ftis_node.records.envelope import Announcement

log = logging.getLogger(__name__)

RECENT_QUESTION = b"ftis/recent/1"  # "announce again what you made lately"
MAX_WANTED_PER_PEER = 1024  # ids; the oldest are forgotten
GATHER_S = 0.02  # announcements that come together are pulled together
REPAIR_PERIOD_S = 1.0
SILENCE_S = 3.0  # without an announcement of a peer while the learner lacks groups


@dataclass(slots=True)
class Heard:
    """What was heard of a peer: its highest running number, when, and whether a number was left out."""

    number: int = 0
    at: float = 0.0
    has_gap: bool = False

    def note(self, number: int, *, at: float) -> None:
        """An announcement with this number arrived at this time (seconds, monotonic)."""
        self.has_gap |= number > self.number + 1
        self.number, self.at = max(self.number, number), at


class Source(NamedTuple):
    """Where groups are to be had, and in which form."""

    peer_id: str
    as_text: bool


class PullLoop:
    """Who announced what, and the pulls under way. A body is asked for once at a time."""

    def __init__(self, parts: Parts, intake: IntakeLoop) -> None:
        self._parts = parts
        self._intake = intake
        self._wanted: dict[Source, dict[bytes, bool]] = defaultdict(dict)  # id -> whether a repair brought it
        self._pulling: set[bytes] = set()
        self._changed = asyncio.Event()
        self._heard: dict[str, Heard] = {}

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen(), name="pull-listen")
            tasks.create_task(self._pull_what_is_wanted(tasks), name="pull-dispatch")
            tasks.create_task(self._repair(), name="pull-repair")

    async def catch_up(self, peer_id: str) -> None:
        """Asks a peer for what it made lately and puts on the list what was missed."""
        heard = self._heard.setdefault(peer_id, Heard())
        heard.has_gap, heard.at = False, time.monotonic()
        fetched = await self._parts.gossip.ask(peer_id, RECENT_QUESTION)
        for payload in fetched.bodies:
            self._consider(peer_id, payload, is_repair=True)

    async def _repair(self) -> None:
        while True:
            await asyncio.sleep(REPAIR_PERIOD_S)
            _, foreign_ready = self._parts.reader.ready_counts()
            is_short = foreign_ready < self._parts.manifest.step.foreign_groups
            for peer_id in await self._parts.gossip.members():
                heard = self._heard.setdefault(peer_id, Heard())
                if heard.has_gap or (is_short and time.monotonic() - heard.at > SILENCE_S):
                    await self.catch_up(peer_id)

    async def _listen(self) -> None:
        async for message in self._parts.gossip.announcements():
            if announcement := self._consider(message.sender, message.payload):
                self._heard.setdefault(message.sender, Heard()).note(announcement.number, at=time.monotonic())

    def _consider(self, peer_id: str, payload: bytes, *, is_repair: bool = False) -> Announcement | None:
        """Puts an announced group on the list of what to pull, if the learner could use it; None if it could not."""
        figures = self._parts.figures.peer(peer_id)
        try:
            announcement = open_announcement(payload)
        except RecordError as error:
            figures.refused[f"announcement_{error.reason}"] += 1
            self._parts.figures.refused[f"announcement_{error.reason}"] += 1
            return None
        source = Source(peer_id, announcement.tokenizer != bytes.fromhex(self._parts.tokenizer.fingerprint)[:8])
        is_ignored = source.as_text and self._parts.manifest.step.other_tokenizers == "ignore"
        fits = announcement.envelope_bytes <= self._parts.manifest.wire.max_envelope_bytes
        if is_ignored or not fits or self._was_pulled(source, announcement):
            return None
        wanted = self._wanted[source]
        wanted[announcement.id] = is_repair
        if len(wanted) > MAX_WANTED_PER_PEER:
            del wanted[next(iter(wanted))]
        self._changed.set()
        return announcement

    def _was_pulled(self, source: Source, announcement: Announcement) -> bool:
        """Whether the group is here or on its way. A text is stored under an id of its own, but the same number."""
        if source.as_text and self._parts.reader.has_number(source.peer_id, announcement.number):
            return True
        return self._is_here(announcement.id)

    def _is_here(self, group_id: bytes) -> bool:
        return group_id in self._pulling or self._parts.reader.is_known(group_id)

    async def _pull_what_is_wanted(self, tasks: asyncio.TaskGroup) -> None:
        pulls_in_flight = asyncio.Semaphore(self._parts.settings.swarm.pulls_in_flight)
        while True:
            await self._changed.wait()
            await asyncio.sleep(GATHER_S)
            self._changed.clear()
            for source in list(self._wanted):
                while batch := self._next_batch(source):
                    await pulls_in_flight.acquire()
                    task = tasks.create_task(self._pull(source, batch), name=f"pull-{source.peer_id[-6:]}")
                    task.add_done_callback(lambda _: pulls_in_flight.release())

    def _next_batch(self, source: Source) -> dict[bytes, bool]:
        """The newest wanted ids of a source, taken off the list and marked as being pulled."""
        wanted = self._wanted[source]
        batch: dict[bytes, bool] = {}
        while wanted and len(batch) < self._parts.settings.swarm.pull_batch:
            group_id, is_repair = wanted.popitem()
            if not self._is_here(group_id):
                batch[group_id] = is_repair
                self._pulling.add(group_id)
        if not wanted:
            del self._wanted[source]
        return batch

    async def _pull(self, source: Source, batch: Mapping[bytes, bool]) -> None:
        peer_id, as_text = source
        timeout_s = self._parts.settings.swarm.pull_timeout_s
        try:
            fetched = await self._parts.gossip.fetch(peer_id, list(batch), as_text=as_text, timeout_s=timeout_s)
            if fetched.outcome is not FetchOutcome.COMPLETE:
                self._parts.figures.peer(peer_id).failed_pulls += 1
                self._parts.events.write("pull_failed", peer=peer_id, outcome=fetched.outcome, num_ids=len(batch))
            checked = await self._bring_to_door(peer_id, fetched.bodies)
            self._parts.figures.groups_repaired += sum(batch.get(group_id, False) for group_id in checked)
        finally:
            self._pulling.difference_update(batch)

    async def _bring_to_door(self, peer_id: str, bodies: Sequence[bytes]) -> list[bytes]:
        """The ids, as announced, of those that passed, which the peer is told."""
        verdicts = [await self._intake.submit(data, origin=peer_id, own=False) for data in bodies]
        checked = [verdict.announced_id for verdict in verdicts if isinstance(verdict, Accepted)]
        if checked and not await self._parts.gossip.confirm(peer_id, checked):
            log.info("%s could not be told that %d groups arrived", peer_id, len(checked))
        return checked
