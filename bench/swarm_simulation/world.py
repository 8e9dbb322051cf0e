"""The simulated swarm: participants, churn, and how announcements spread.

An announcement is one event: all readers of its shard receive it at the same time, after a random delay. Each reader
loses it with the same probability. Everything else happens between two peers.
"""

from __future__ import annotations

import heapq
import math
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, Final

from ftis_node.swarm.demand import MIN_MEMBERS_PER_SHARD
from ftis_node.swarm.topology import NUM_MEMBER_BUCKETS, shard_of
from swarm_simulation.announcement import AnnouncedGroup, AnnouncementEvent
from swarm_simulation.attackers import KINDS
from swarm_simulation.host_link import Kind
from swarm_simulation.node import SimulatedNode
from swarm_simulation.observed import ObservedNode
from swarm_simulation.settings import NUM_VIEWS, Role, SimulationSettings, copies_of
from swarm_simulation.transfers import Transfers

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarm_simulation.peer import Peer

GOSSIP_SPREAD = 0.5  # sigma of the logarithm of the delay
NUM_ASKED_BY_NEWCOMER: Final = 3
NOT_SIMULATED: Final = 1 << 30  # readers of a shard that is not simulated, so that it is chosen last
NUM_REPLICAS: Final = 5  # of a directory record


class Events:
    """Priority queue of events by time in seconds; `now` is the time of the current event."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()

    def after(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        """Schedule `act(*arguments)` in `delay_s`."""
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), act, arguments))

    def run_until(self, end_s: float) -> None:
        """Run all events up to and including this time."""
        while self._queue and self._queue[0][0] <= end_s:
            self.now, _, act, arguments = heapq.heappop(self._queue)
            act(*arguments)
        self.now = end_s


class MemberViews:
    """Members of a shard, and the views of the last few periods, newest first.

    The directory shows new members late, and departed ones until their records expire.
    """

    def __init__(self, *, record_lives_s: float) -> None:
        self._record_lives_s = record_lives_s
        self._left_at: dict[str, float | None] = {}
        self.views: tuple[frozenset[str], ...] = (frozenset(),) * NUM_VIEWS

    def join(self, peer_id: str) -> None:
        self._left_at[peer_id] = None

    def leave(self, peer_id: str, *, now: float) -> None:
        """Remove a member; it stays in the views until its record expires."""
        self._left_at[peer_id] = now

    def begin(self) -> None:
        """Start with views that contain all members."""
        self.views = (frozenset(self._left_at),) * NUM_VIEWS

    def look(self, *, now: float) -> None:
        """Start a new period."""
        lapsed = [
            peer for peer, left_at in self._left_at.items() if left_at is not None and self._is_over(left_at, now)
        ]
        for peer in lapsed:
            del self._left_at[peer]
        self.views = (frozenset(self._left_at), *self.views[:-1])

    def _is_over(self, left_at: float, now: float) -> bool:
        return now - left_at > self._record_lives_s


class World:
    """The simulated swarm. `peers` are the present participants by id."""

    def __init__(self, settings: SimulationSettings) -> None:
        self.settings = settings
        self.random = Random(settings.seed)
        self.events = Events()
        self.peers: dict[str, Peer] = {}
        self.gone: list[SimulatedNode] = []
        self.groups: dict[bytes, AnnouncedGroup] = {}
        self.readers: list[dict[str, SimulatedNode]] = [{} for _ in range(settings.num_shards)]
        self.member_views = [MemberViews(record_lives_s=settings.record_lives_s) for _ in range(settings.num_shards)]
        self.transfers = Transfers(self)
        self.num_elsewhere = 0  # peers of shards that are not simulated
        self._num_made = 0
        elsewhere = range(settings.num_simulated_shards, settings.num_shards)
        self._num_readers = dict.fromkeys(elsewhere, NOT_SIMULATED)
        self._num_lost_before = self._draw_gap()

    def populate(self) -> None:
        """Create the participants of the start, who have known each other for long."""
        num_attackers = round(self.settings.num_nodes * self.settings.attackers_share)
        num_honest = self.settings.num_nodes - num_attackers
        kinds: list[Callable[[World, str], Peer]] = [SimulatedNode] * num_honest
        kinds += [KINDS[number % len(KINDS)] for number in range(num_attackers)]
        made: list[Peer] = []
        for kind in kinds:
            peer_id = self._new_peer_id()
            if not self._is_simulated(peer_id):
                self.num_elsewhere += 1
                continue
            is_observed = kind is SimulatedNode and len(made) < self.settings.num_observed
            made.append(self._make(ObservedNode if is_observed else kind, peer_id))
        for views_of_shard in self.member_views:
            views_of_shard.begin()
        for peer in made:
            peer.begin()
        self.events.after(self.settings.listing_period_s, self._look)
        self._wait_for_churn()

    def announce(self, group: AnnouncedGroup, *, attempt: int) -> None:
        """Deliver a group's announcement to its readers after a delay."""
        self.groups[group.id] = group
        delay_s = self.random.lognormvariate(math.log(self.settings.gossip_delay_s), GOSSIP_SPREAD)
        self.events.after(delay_s, self._deliver, group, attempt)

    def pulled(self, group: AnnouncedGroup, node: SimulatedNode) -> None:
        """Note that a node has validated and stored a group."""
        if node.role is not Role.HONEST:
            return
        group.num_pulls += 1
        if group.pulled_at is None:
            group.pulled_at = self.events.now
            group.attempt_pulled = group.call.attempt if group.call else 0

    def new_id(self) -> bytes:
        """Return a new group id."""
        return self.random.randbytes(32)

    def some_members(self, shard: int, count: int) -> list[str]:
        """Return random members of a shard, as last listed."""
        members = list(self.member_views[shard].views[0])
        members.sort()
        return self.random.sample(members, min(count, len(members)))

    def known_readers(self) -> dict[int, int]:
        """Return the number of readers of each shard, as last listed. Shards that are not simulated are never
        chosen.
        """
        return self._num_readers

    def count_directory(self, node: SimulatedNode, *, num_members: int) -> None:
        """Count one period of directory traffic: store the record, read the shard's members, serve as much to
        others.
        """
        settings = self.settings
        num_hops = math.ceil(math.log2(max(2, self.num_peers)) / 2)
        num_buckets = NUM_MEMBER_BUCKETS // settings.num_shards
        num_bytes = (num_buckets + 1) * num_hops * settings.hop_bytes
        num_bytes += (num_members + NUM_REPLICAS) * settings.record_bytes
        node.traffic.received[Kind.DIRECTORY] += num_bytes
        node.traffic.sent[Kind.DIRECTORY] += num_bytes

    @property
    def num_peers(self) -> int:
        """Number of participants, simulated or not."""
        return len(self.peers) + self.num_elsewhere

    def honest(self) -> list[SimulatedNode]:
        return [peer for peer in self.peers.values() if isinstance(peer, SimulatedNode) and peer.role is Role.HONEST]

    def reset(self) -> None:
        """End the warm-up: restart all counters."""
        for node in self.honest():
            node.traffic.reset()
            node.announcement_bytes = node.policy_s = 0.0
            node.num_heard = node.num_steps = node.num_full_steps = 0

    def _deliver(self, group: AnnouncedGroup, attempt: int) -> None:
        now, readers = self.events.now, self.readers[group.shard]
        num_bytes = self.settings.announcement_bytes * copies_of(len(readers))
        call = self._call(group, attempt=attempt, num_bytes=num_bytes)
        group.call = call
        until_lost = self._num_lost_before
        for node in readers.values():
            if until_lost == 0:
                until_lost = self._draw_gap()
                continue
            until_lost -= 1
            node.announcement_bytes += num_bytes
            node.receive(group, call, now)
        self._num_lost_before = until_lost

    def _call(self, group: AnnouncedGroup, *, attempt: int, num_bytes: float) -> AnnouncementEvent:
        """Return the announcement with the members among whom it is assigned, as in `eligible_members`."""
        views, shard = self.member_views[group.shard].views, group.shard
        is_small = self.num_peers - 1 < MIN_MEMBERS_PER_SHARD * self.settings.num_shards
        if is_small:
            views = tuple(
                frozenset().union(*of_shards) for of_shards in zip(*(c.views for c in self.member_views), strict=True)
            )
        return AnnouncementEvent(
            group.id, group.sender, views,
            shard=None if is_small else shard, attempt=attempt, num_bytes=num_bytes,
        )  # fmt: skip

    def _draw_gap(self) -> int:
        """Return how many deliveries succeed before the next lost one."""
        if not self.settings.loss:
            return 1 << 62
        return int(math.log(1.0 - self.random.random()) / math.log(1.0 - self.settings.loss))

    def _new_peer_id(self) -> str:
        self._num_made += 1
        return f"12D3Koo-{self.settings.seed}-{self._num_made}"

    def _is_simulated(self, peer_id: str) -> bool:
        return shard_of(peer_id, self.settings.num_shards) < self.settings.num_simulated_shards

    def _make(self, kind: Callable[[World, str], Peer], peer_id: str) -> Peer:
        peer = kind(self, peer_id)
        self.peers[peer.peer_id] = peer
        self.member_views[peer.shard].join(peer.peer_id)
        return peer

    def _look(self) -> None:
        for views_of_shard in self.member_views:
            views_of_shard.look(now=self.events.now)
        for shard, readers in enumerate(self.readers[: self.settings.num_simulated_shards]):
            self._num_readers[shard] = len(readers)
        self.events.after(self.settings.listing_period_s, self._look)

    def _wait_for_churn(self) -> None:
        rate_per_s = (self.settings.num_nodes - self.num_elsewhere) * self.settings.leave_share_per_hour / 3600
        if rate_per_s:
            self.events.after(self.random.expovariate(rate_per_s), self._churn)

    def _churn(self) -> None:
        """Remove one honest node without notice, and add another."""
        honest = self.honest()
        if len(honest) > 1:
            node = honest[self.random.randrange(len(honest))]
            node.is_gone = True
            node.shard_reader.leave()
            del self.peers[node.peer_id]
            self.member_views[node.shard].leave(node.peer_id, now=self.events.now)
            self.gone.append(node)
        while not self._is_simulated(peer_id := self._new_peer_id()):
            continue
        newcomer = self._make(SimulatedNode, peer_id)
        newcomer.begin()
        if isinstance(newcomer, SimulatedNode):
            self._catch_up(newcomer)
        self._wait_for_churn()

    def _catch_up(self, newcomer: SimulatedNode) -> None:
        """Query a few members of the shard for recent groups."""
        settings = self.settings
        for peer_id in self.some_members(newcomer.shard, NUM_ASKED_BY_NEWCOMER):
            peer = self.peers.get(peer_id)
            if peer is None or peer is newcomer:
                continue
            answer = peer.answer([(1, peer.last_number)])
            newcomer.send(peer, Kind.QUESTIONS, settings.request_bytes)
            num_bytes = settings.request_bytes + settings.answered_announcement_bytes * len(answer)
            peer.send(newcomer, Kind.QUESTIONS, num_bytes)
            for group in answer:
                if group.call is not None:
                    newcomer.receive(group, group.call, self.events.now)
