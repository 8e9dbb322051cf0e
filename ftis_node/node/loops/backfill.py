"""Backfill requests announcements that this node missed. The shards loop chooses the gossip shards that it reads.

Requests of the backfill by cause:

    | cause                                 | request                                 | queried peer                   |
    |---------------------------------------|-----------------------------------------|--------------------------------|
    | a member is new to this node          | its groups newer than the last received | that member; the first few     |
    |                                       |                                         | members, for all senders       |
    | a gap in a sender's numbers, or a     | those numbers                           | the sender, else any           |
    | higher number in its directory record |                                         | member                         |
    | too few foreign groups for a step,    | its groups newer than the last received | that member                    |
    | and a member announces nothing        |                                         |                                |

The shards loop chooses shards of the run by the pull rule, their yield and the budget:

    consumes: counts of announcements received, peers' records     produces: subscriptions, catch-up requests
    waits for: the clock                                           unblocked by: time

The node always reads its own shard and those of trusted peers, because generators with this node's weights are there.
It subscribes to a new shard before it queries the members for earlier groups, so that it misses none.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ftis_node.gossip import Fetched, FetchOutcome
from ftis_node.node.loops.announcements import MAX_SENDERS
from ftis_node.node.loops.pull_slots import ANSWERED, Pace, QuerySlots
from ftis_node.node.supervision.task_monitor import pause
from ftis_node.records.bounds import MAX_INTEGER
from ftis_node.records.peer_messages import BackfillRequest
from ftis_node.swarm.demand import pulls_all
from ftis_node.swarm.peer_guard import PeerBackoff, Place
from ftis_node.swarm.rate_limits import TokenBucket
from ftis_node.swarm.sequence import BackfillProgress
from ftis_node.swarm.topology import FIRST_SHARDS, choose_shards, num_affordable, shard_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.gossip import Gossip
    from ftis_node.node.context import NodeContext, NodeCounters
    from ftis_node.node.loops.announcements import AnnouncementHandler
    from ftis_node.node.peers.manager import PeerManager
    from ftis_node.node.peers.registry import PeerRegistry
    from ftis_node.node.training.step_shares import StepShares
    from ftis_node.records.envelope import PeerRecord
    from ftis_node.replay.reader import ReplayReader
    from ftis_node.swarm.sequence import SequenceGap

log = logging.getLogger(__name__)

PERIOD_S = 1.0
SILENCE_S = 3.0  # time without a new number after which a member is queried, if a step lacks foreign groups
MAX_AT_ONCE = 8  # silent members, senders with gaps, and queries, each for peers of one pace (`QuerySlots`)
MAX_PAGES = 16
FAILED_REST_S = 10.0
PAGE = 256  # announcements in one answer
GAPS_PER_TURN = 16  # of one sender
EVERYBODYS_PER_MINUTE = 3.0
SHARDS_INTERVAL_S = 10.0


@dataclass(kw_only=True, eq=False, repr=False)
class BackfillLoop:
    """Loop that queries members and passes their answers to the announcement handler."""

    context: NodeContext
    announcements: AnnouncementHandler
    gossip: Gossip
    reader: ReplayReader
    peers: PeerManager
    counters: NodeCounters
    step_shares: StepShares

    def __post_init__(self) -> None:
        self._pauses = PeerBackoff(first_s=FAILED_REST_S)
        self._caught_up: dict[str, None] = {}  # peers with a complete answer by time, oldest first
        self._everybodys = TokenBucket(rate_per_s=EVERYBODYS_PER_MINUTE / 60, burst=EVERYBODYS_PER_MINUTE)
        self._catching_up = BackfillProgress()
        self._slots = QuerySlots(MAX_AT_ONCE)
        self._querying: dict[str, Pace] = {}  # silent members that are queried
        self._filling: dict[str, Pace] = {}  # senders whose gaps are queried
        self._shards: frozenset[int] | None = None  # the shards that this node reads; None: all

    async def run(self) -> None:
        """Run until canceled. A slow peer delays no request to a quick one."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await pause(PERIOD_S)
                self._fill_gaps(tasks)
                for peer_id in await self._silent_members():
                    if self._slots.takes_turn(self._querying, peer_id):
                        tasks.create_task(self._query_silent(peer_id), name=f"repair-silent-{peer_id[-6:]}")
                self._report_progress()

    def read_shards(self, shards: frozenset[int]) -> None:
        """Track and query only the senders in these gossip shards from now on."""
        self._shards = shards

    async def catch_up(self, peer_id: str) -> None:
        """Query a member for its missed groups; query the first few new members for the groups of all senders."""
        with self.gossip.guard.work_for(peer_id, Place.CATCH_UP):
            if self._may_ask(peer_id):
                await self._catch_up(peer_id)

    async def _catch_up(self, peer_id: str) -> None:
        tracker, is_known = self.announcements.tracker_of(peer_id), peer_id in self._caught_up
        tracker.at = time.monotonic()
        is_for_all = not is_known and self._everybodys.take(1.0, now=time.monotonic())
        since = max(
            time.time() - self.context.manifest.step.max_age_s, self.announcements.oldest_usable
        )  # a peer that answers only with unusable groups gets a pause
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
            if num_answers < PAGE or newest <= since:
                break
            if not is_known:
                since = min(newest, time.time() + self.context.settings.validation.max_clock_skew_s)
        self._caught_up[peer_id] = None
        if len(self._caught_up) > MAX_SENDERS:
            del self._caught_up[next(iter(self._caught_up))]

    def note_record(self, record: PeerRecord) -> None:
        """Note the last sequence number of a member, from its directory record."""
        if self._follows(record.peer_id):
            self.announcements.tracker_of(record.peer_id).note_tail(record.last_number)

    def _report_progress(self) -> None:
        """Log the progress after an absence: groups missed, received and left."""
        report = self._catching_up.check(
            num_left=self.announcements.queue.num_missed,
            num_backfilled=self.counters.groups_repaired,
            now=time.monotonic(),
        )
        if report is None:
            return
        if report.num_left == 0:
            log.debug("caught up: %d missed groups in %.0f s", report.num_here, report.elapsed_s)
            duration_s = round(report.elapsed_s, 1)
            self.context.events.write("caught_up", num_groups=report.num_here, duration_s=duration_s)
        elif report.time_left_s is None:
            log.debug("catching up: %d missed groups are requested", report.num_left)
        else:
            whole = report.num_here + report.num_left
            log.debug(
                "catching up: %d of %d missed groups, about %.0f s left", report.num_here, whole, report.time_left_s
            )

    def _fill_gaps(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to query gaps, a few of each sender. Senders with many gaps, or that answer slowly, delay no others."""
        for sender in self.announcements.senders():
            with self.gossip.guard.work_for(sender, Place.CATCH_UP):
                gaps = self.announcements.tracker_of(sender).gaps if self._follows(sender) else ()
                if gaps and self._slots.takes_turn(self._filling, sender):
                    filling = self._fill_all(sender, gaps[:GAPS_PER_TURN])
                    tasks.create_task(filling, name=f"repair-gaps-{sender[-6:]}")

    async def _fill_all(self, sender: str, gaps: Sequence[SequenceGap]) -> None:
        try:
            for gap in gaps:
                with self.gossip.guard.work_for(sender, Place.CATCH_UP) as work:
                    await self._fill(sender, gap, await self.gossip.members())
                if work.failed or self._slots.pace_of(sender) is Pace.SLOW:
                    return  # one gap in a turn of a slow sender
        finally:
            del self._filling[sender]

    async def _fill(self, sender: str, gap: SequenceGap, members: list[str]) -> None:
        """Query the sender first if it is a member; after a try without result, query any member."""
        able = [peer for peer in members if self._may_ask(peer)]  # without those in a pause after a failure
        if not able:
            return
        others = [peer for peer in able if self._slots.pace_of(peer) is not Pace.SLOW]
        peer_id = sender if sender in able and not gap.tries else random.choice(others or able)
        question = BackfillRequest(sender=sender, first_number=gap.first, last_number=gap.last)
        _, _, outcome = await self._ask(peer_id, question)
        tracker = self.announcements.tracker_of(sender)
        tracker.note_query(gap, is_final=peer_id == sender and outcome is FetchOutcome.COMPLETE)

    async def _silent_members(self) -> list[str]:
        """Return the members to query, the longest silent first; none if the next step lacks no foreign groups."""
        _, foreign_ready = self.reader.ready_counts()
        if foreign_ready >= self.step_shares.of_next_step()[1]:
            return []
        silent = {peer_id: self._silent_since(peer_id) for peer_id in await self.gossip.members()}
        due = time.monotonic() - SILENCE_S
        return sorted((peer for peer, since in silent.items() if since < due), key=silent.__getitem__)

    def _silent_since(self, peer_id: str) -> float:
        """Return when a member last announced a higher number or was queried; infinity if it is not to be queried."""
        since = math.inf
        with self.gossip.guard.work_for(peer_id, Place.CATCH_UP):
            if peer_id not in self._querying and self._follows(peer_id) and self._may_ask(peer_id):
                since = self.announcements.tracker_of(peer_id).at
        return since

    async def _query_silent(self, peer_id: str) -> None:
        try:
            with self.gossip.guard.work_for(peer_id, Place.CATCH_UP):
                await self.catch_up(peer_id)
        finally:
            self._querying.pop(peer_id, None)

    async def _ask(self, peer_id: str, question: BackfillRequest) -> tuple[float, int, FetchOutcome]:
        """Send a request and handle the announcements in the answer.

        Return the newest creation time among the usable ones (Unix seconds, else 0), their number, and the outcome.
        """
        fetched = Fetched((), FetchOutcome.BROKEN)
        with self.gossip.guard.work_for(peer_id, Place.CATCH_UP):
            send = partial(self.gossip.request_backfill, peer_id, question.to_bytes())
            fetched = await self._slots.query(peer_id, send)
        newest = 0.0
        for payload in fetched.bodies:
            with self.gossip.guard.work_for(peer_id, Place.ANNOUNCEMENT):
                for announcement in self.announcements.handle(peer_id, payload, is_repair=True):
                    newest = max(newest, announcement.created_at)
                    if announcement.sender is None:
                        self.announcements.tracker_of(peer_id).note(announcement.number, at=time.monotonic())
        is_answered = fetched.outcome in ANSWERED
        is_useless = question.sender == peer_id and bool(fetched.bodies) and not newest
        if is_answered and not is_useless:
            self._pauses.succeeded(peer_id)
        else:  # also if no announcement is usable: else this node would read the same ones every few seconds
            self._pauses.failed(peer_id, now=time.monotonic())
        return newest, len(fetched.bodies), fetched.outcome

    def _may_ask(self, peer_id: str) -> bool:
        """Return whether to query a member: not banned, and not in a pause after a failed request."""
        may_work = self.gossip.guard.may_work(peer_id) and not self.peers.is_banned(peer_id)
        return may_work and self._pauses.may_ask(peer_id, now=time.monotonic())

    def _follows(self, peer_id: str) -> bool:
        num_shards = self.context.manifest.wire.announcement_shards
        is_read = self._shards is None or shard_of(peer_id, num_shards) in self._shards
        return is_read and not self.peers.is_banned(peer_id)


@dataclass(kw_only=True, eq=False, repr=False)
class ShardsLoop:
    """Loop that selects shards every few seconds. It does nothing in a run with one shard.

    A node that pulls every group reads every shard. Otherwise a burst of announcements would end a subscription, and
    the groups of that shard would arrive ten seconds late.
    """

    context: NodeContext
    gossip: Gossip
    peers: PeerManager
    registry: PeerRegistry
    announcements: AnnouncementHandler
    backfill: BackfillLoop

    def __post_init__(self) -> None:
        self._num_shards = self.context.manifest.wire.announcement_shards
        self._read: frozenset[int] = frozenset()

    async def run(self) -> None:
        """Run until canceled."""
        async with asyncio.TaskGroup() as tasks:
            await self._choose(tasks, count=min(FIRST_SHARDS, self._num_shards))
            while True:
                before, counted_at = self._num_announcements(), time.monotonic()
                await pause(SHARDS_INTERVAL_S)
                announcements_per_s = (self._num_announcements() - before) / (time.monotonic() - counted_at)
                count = self._num_shards if await self._pulls_all() else self._num_affordable(announcements_per_s)
                if count != len(self._read) or not self._required() <= self._read:
                    await self._choose(tasks, count=count)

    async def _pulls_all(self) -> bool:
        swarm, num_members = self.context.settings.swarm, len(await self.gossip.known_members())
        return pulls_all(swarm.pull_policy, num_members=num_members, small_swarm=swarm.pull_all_max_peers)

    def _num_affordable(self, announcements_per_s: float) -> int:
        return num_affordable(
            announcements_per_s,
            num_read=len(self._read),
            num_shards=self._num_shards,
            budget_per_s=self.context.settings.swarm.announcements_per_s,
        )

    def _num_announcements(self) -> int:
        return self.announcements.announcements_by_shard.total()

    def _required(self) -> frozenset[int]:
        """Return the shards of the trusted peers in the directory."""
        peers = self.peers
        known = self.registry.peers
        return frozenset(shard_of(peer_id, self._num_shards) for peer_id in known if peers.is_trusted(peer_id))

    async def _choose(self, tasks: asyncio.TaskGroup, *, count: int) -> None:
        """Subscribe to `count` shards, and catch up with the members of the new ones in separate tasks."""
        readers = Counter(
            shard for peer in self.registry.peers.values() if peer.record for shard in peer.record.read_shards
        )
        chosen = choose_shards(
            self.context.peer_id,
            num_shards=self._num_shards,
            count=count,
            readers=readers,
            required=self._required(),
        )
        if chosen == self._read:
            return
        await self.gossip.read_shards(chosen)
        news, self._read = chosen - self._read, chosen
        self.context.state.read_shards = chosen
        self.backfill.read_shards(chosen)
        self.context.events.write("shards", read=sorted(chosen))
        log.debug("reading announcements of %d of %d shards", len(chosen), self._num_shards)
        for peer_id in await self.gossip.members():
            with self.gossip.guard.work_for(peer_id, Place.CATCH_UP):
                if shard_of(peer_id, self._num_shards) in news:
                    tasks.create_task(self.backfill.catch_up(peer_id), name=f"shard-catch-up-{peer_id[-6:]}")
