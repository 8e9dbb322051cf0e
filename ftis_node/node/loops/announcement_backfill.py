"""The backfill requests announcements that this node missed, by cause:

| cause                                 | request                                 | queried peer                   |
|---------------------------------------|-----------------------------------------|--------------------------------|
| a member is new to this node          | its groups newer than the last received | that member; the first few     |
|                                       |                                         | members, for all senders       |
| a gap in a sender's numbers, or a     | those numbers                           | the sender, else any           |
| higher number in its directory record |                                         | member                         |
| too few foreign groups for a step,    | its groups newer than the last received | that member                    |
| and a member announces nothing        |                                         |                                |
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ftis_node.backoff import BackoffTable, doubling
from ftis_node.gossip import MAX_ANSWERS, FetchOutcome
from ftis_node.node.peers.announcements import MAX_SENDERS, AnnouncementHandler
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.peers.outgoing_slots import ANSWERED, Pace, QuerySlots
from ftis_node.node.training.step_shares import StepShares
from ftis_node.records.bounds import MAX_INTEGER
from ftis_node.records.envelope import PeerRecord
from ftis_node.records.peer_messages import BackfillRequest
from ftis_node.swarm.lru import LruDict
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.rate_limits import TokenBucket
from ftis_node.swarm.sequence import SequenceGap
from ftis_node.swarm.topology import shard_of
from ftis_node.validation.rules import MAX_CLOCK_SKEW_S

PERIOD_S = 1.0
SILENCE_S = 3.0  # time without a new number after which a member is queried, if a step lacks foreign groups
MAX_AT_ONCE = 8  # queried peers of one pace (`QuerySlots`)
MAX_PAGES = 16
FAILED_REST_S = 10.0
GAPS_PER_TURN = 16  # of one sender
EVERYBODYS_PER_MINUTE = 3.0


@dataclass(eq=False, repr=False)
class BackfillLoop(NodePart):
    """Loop that queries members and passes their answers to the announcement handler."""

    announcements: AnnouncementHandler
    step_shares: StepShares

    def __post_init__(self) -> None:
        self._pauses = BackoffTable[str](doubling(FAILED_REST_S))
        self._caught_up = LruDict[str, None](MAX_SENDERS)  # peers with a complete answer
        self._everybodys = TokenBucket(rate_per_s=EVERYBODYS_PER_MINUTE / 60, burst=EVERYBODYS_PER_MINUTE)
        self._slots = QuerySlots(MAX_AT_ONCE)
        self._due: dict[str, bool] = {}  # members to query for missed groups, and whether for those of all senders
        self._has_due = asyncio.Event()
        self._filling: set[str] = set()  # senders whose gaps are queried

    async def run(self) -> None:
        """Run until canceled. A slow peer delays no request to a quick one."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._query_due(tasks), name="backfill-members")
            while True:
                await asyncio.sleep(PERIOD_S)
                self._fill_gaps(tasks, await self.gossip.members())
                for peer_id in await self._silent_members():
                    self.catch_up(peer_id)

    def catch_up(self, peer_id: str) -> None:
        """Query a member for its missed groups soon; query the first few new members for the groups of all senders."""
        if peer_id not in self._due and self._may_ask(peer_id):  # if the peer has a slot, then after that query
            is_new = peer_id not in self._caught_up
            self._due[peer_id] = is_new and self._everybodys.take(1.0, now=time.monotonic())
            self._has_due.set()

    async def _query_due(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._has_due.wait()
            self._has_due.clear()
            self._begin_queries(tasks)

    def _begin_queries(self, tasks: asyncio.TaskGroup) -> None:
        for peer_id in [peer_id for peer_id in self._due if self._slots.take(peer_id)]:
            query = self._query(peer_id, is_for_all=self._due.pop(peer_id))
            tasks.create_task(query, name=f"backfill-{peer_id[-6:]}")

    async def _query(self, peer_id: str, *, is_for_all: bool) -> None:
        try:
            with self.gossip.guard.work_for(peer_id, Place.CATCH_UP):
                if self._may_ask(peer_id):
                    await self._catch_up(peer_id, is_for_all=is_for_all)
        finally:
            if self._slots.turned_slow(peer_id):
                self._due[peer_id] = is_for_all
            self._slots.release(peer_id)
            self._has_due.set()

    async def _catch_up(self, peer_id: str, *, is_for_all: bool) -> None:
        tracker, is_known = self.announcements.tracker_of(peer_id), peer_id in self._caught_up
        tracker.at = time.monotonic()
        since = self.announcements.oldest_usable  # a peer that answers only with unusable groups gets a pause
        for _ in range(MAX_PAGES):
            # By number after the first time: an answer then repeats nothing, and `_fill_gaps` requests lower numbers.
            question = BackfillRequest(
                sender=None if is_for_all else peer_id,
                first_number=min(tracker.highest + 1, MAX_INTEGER) if is_known else 0,
                since=since,
            )
            newest, num_answers, outcome = await self._ask(peer_id, question)
            if outcome is not FetchOutcome.COMPLETE:
                return
            if num_answers < MAX_ANSWERS or newest <= since:
                break
            if not is_known:
                since = min(newest, time.time() + MAX_CLOCK_SKEW_S)
        self._caught_up[peer_id] = None

    def note_record(self, record: PeerRecord) -> None:
        """Note the last sequence number of a member, from its directory record."""
        if self._follows(record.peer_id):
            self.announcements.tracker_of(record.peer_id).note_tail(record.last_number)

    def _fill_gaps(self, tasks: asyncio.TaskGroup, members: Sequence[str]) -> None:
        """Begin to query gaps, a few of each sender. Senders with many gaps, or that answer slowly, delay no others."""
        able = [peer for peer in members if self._may_ask(peer)]  # without those in a pause after a failure
        for sender in self.announcements.senders() if able else ():
            gaps = self.announcements.tracker_of(sender).gaps if self._follows(sender) else ()
            if not gaps or sender in self._filling:
                continue
            peer_id = self._holder_of(sender, gaps[0], able)
            if self._slots.take(peer_id):
                self._filling.add(sender)
                alike = [gap for gap in gaps if bool(gap.tries) == bool(gaps[0].tries)]  # the same peers can help
                filling = self._fill(sender, alike[:GAPS_PER_TURN], peer_id=peer_id)
                tasks.create_task(filling, name=f"backfill-gaps-{sender[-6:]}")

    def _holder_of(self, sender: str, gap: SequenceGap, able: Sequence[str]) -> str:
        """Return the sender first if it is one of the `able` members; after a try without result, any of them."""
        if sender in able and not gap.tries:
            return sender
        others = [peer for peer in able if self._slots.pace_of(peer) is not Pace.SLOW] or able
        return random.choice(others)

    async def _fill(self, sender: str, gaps: Sequence[SequenceGap], *, peer_id: str) -> None:
        try:
            for gap in gaps:
                with self.gossip.guard.work_for(peer_id, Place.CATCH_UP) as work:
                    question = BackfillRequest(sender=sender, first_number=gap.first, last_number=gap.last)
                    _, _, outcome = await self._ask(peer_id, question)
                    if not self._slots.turned_slow(peer_id):  # else a later turn queries the gap
                        is_final = peer_id == sender and outcome is FetchOutcome.COMPLETE
                        self.announcements.tracker_of(sender).note_query(gap, is_final=is_final)
                if work.failed or self._slots.pace_of(peer_id) is Pace.SLOW or not self._may_ask(peer_id):
                    return  # one gap in a turn of a slow peer, or of one that failed
        finally:
            self._filling.remove(sender)
            self._slots.release(peer_id)
            self._has_due.set()

    async def _silent_members(self) -> list[str]:
        """Return the members to query, the longest silent first; none if the next step lacks no foreign groups."""
        _, foreign_ready = self.store.reader.ready_counts()
        if foreign_ready >= self.step_shares.of_next_step()[1]:
            return []
        able = [
            peer_id
            for peer_id in await self.gossip.members()
            if peer_id not in self._slots and self._follows(peer_id) and self._may_ask(peer_id)
        ]
        last_news = {peer_id: self.announcements.tracker_of(peer_id).at for peer_id in able}
        due = time.monotonic() - SILENCE_S
        return sorted((peer for peer, at in last_news.items() if at < due), key=last_news.__getitem__)

    async def _ask(self, peer_id: str, question: BackfillRequest) -> tuple[float, int, FetchOutcome]:
        """Send a request and handle the announcements in the answer.

        Return the newest creation time among the usable ones (Unix seconds, else 0), their number, and the outcome.
        """
        began_at, limit_s = time.monotonic(), self._slots.limit_s(peer_id)
        fetched = await self.gossip.request_backfill(peer_id, question.to_bytes(), timeout_s=limit_s)
        is_answered = fetched.outcome in ANSWERED
        self._slots.note(peer_id, took_s=time.monotonic() - began_at, is_answered=is_answered)
        newest = 0.0
        for payload in fetched.items:
            for announcement in self.announcements.handle(peer_id, payload, is_repair=True):
                newest = max(newest, announcement.created_at)
                if announcement.sender is None:
                    self.announcements.tracker_of(peer_id).note(announcement.number, at=time.monotonic())
        is_useless = question.sender == peer_id and bool(fetched.items) and not newest
        if is_answered and not is_useless:
            self._pauses.discard(peer_id)
        elif not self._slots.turned_slow(peer_id):  # also if no announcement is usable: the next answer has the same
            self._pauses.failed(peer_id, now=time.monotonic())
        return newest, len(fetched.items), fetched.outcome

    def _may_ask(self, peer_id: str) -> bool:
        may_work = self.gossip.guard.may_work(peer_id) and not self.peers.is_banned(peer_id)
        return may_work and self._pauses.is_due(peer_id, now=time.monotonic())

    def _follows(self, peer_id: str) -> bool:
        """Return whether to track and query a sender: not banned, and in a shard that the node reads; at first all."""
        read, num_shards = self.context.state.read_shards, self.context.manifest.wire.announcement_shards
        return (not read or shard_of(peer_id, num_shards) in read) and not self.peers.is_banned(peer_id)
