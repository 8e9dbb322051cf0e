"""The simulated swarm: the state of all participants, and the delivery of announcements.

An announcement is one event: all readers of its shard receive it at the same time, after a random delay. Each reader
loses it with the same probability. Everything else happens between two peers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from random import Random
from typing import Final, Protocol

from ftis_node.swarm.demand import MIN_MEMBERS_PER_SHARD
from ftis_node.swarm.rate_limits import TokenBucket
from ftis_node.swarm.topology import NUM_MEMBER_BUCKETS, shard_of
from swarm_simulation.announcement import AnnouncedGroup, AnnouncementEvent
from swarm_simulation.events import Events
from swarm_simulation.host_link import ByteCounts, HostLink, Kind
from swarm_simulation.member_views import MemberViews
from swarm_simulation.settings import Role, SimulationSettings, copies_of

GOSSIP_SPREAD = 0.5  # sigma of the logarithm of the delay
NOT_SIMULATED: Final = 1 << 30  # readers of a shard that is not simulated, so that it is chosen last
NUM_REPLICAS: Final = 5  # of a directory record
MAX_OWN = 256  # own groups kept for queries
MAX_ANSWERS = 64  # announcements in one answer


class Reader(Protocol):
    """A participant that subscribes to shards."""

    announcement_bytes: float  # received and forwarded

    def receive(self, group: AnnouncedGroup, call: AnnouncementEvent, now: float) -> None: ...


class World:
    """The simulated swarm. `peers` are the present participants by id."""

    def __init__(self, settings: SimulationSettings) -> None:
        self.settings = settings
        self.random = Random(settings.seed)
        self.events = Events()
        self.peers: dict[str, Peer] = {}
        self.groups: dict[bytes, AnnouncedGroup] = {}
        self.readers: list[dict[str, Reader]] = [{} for _ in range(settings.num_shards)]
        self.member_views = [MemberViews(record_lives_s=settings.record_lives_s) for _ in range(settings.num_shards)]
        self.num_elsewhere = 0  # peers of shards that are not simulated
        elsewhere = range(settings.num_simulated_shards, settings.num_shards)
        self._num_readers = dict.fromkeys(elsewhere, NOT_SIMULATED)
        self._num_lost_before = self._draw_gap()

    def announce(self, group: AnnouncedGroup, *, attempt: int) -> None:
        """Deliver a group's announcement to its readers after a delay."""
        self.groups[group.id] = group
        delay_s = self.random.lognormvariate(math.log(self.settings.gossip_delay_s), GOSSIP_SPREAD)
        self.events.after(delay_s, self._deliver, group, attempt)

    def pulled(self, group: AnnouncedGroup, role: Role) -> None:
        """Note that a node of that role has validated and stored a group."""
        if role is not Role.HONEST:
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

    def count_directory(self, traffic: ByteCounts, *, num_members: int) -> None:
        """Count one period of directory traffic: store the record, read the shard's members, serve as much to
        others.
        """
        settings = self.settings
        num_hops = math.ceil(math.log2(max(2, self.num_peers)) / 2)
        num_buckets = NUM_MEMBER_BUCKETS // settings.num_shards
        num_bytes = (num_buckets + 1) * num_hops * settings.hop_bytes
        num_bytes += (num_members + NUM_REPLICAS) * settings.record_bytes
        traffic.received[Kind.DIRECTORY] += num_bytes
        traffic.sent[Kind.DIRECTORY] += num_bytes

    def list_members(self) -> None:
        """Start a new period of the directory."""
        for views_of_shard in self.member_views:
            views_of_shard.start_period(now=self.events.now)
        for shard, readers in enumerate(self.readers[: self.settings.num_simulated_shards]):
            self._num_readers[shard] = len(readers)
        self.events.after(self.settings.listing_period_s, self.list_members)

    @property
    def num_peers(self) -> int:
        """Number of participants, simulated or not."""
        return len(self.peers) + self.num_elsewhere

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


class Peer:
    """One participant under one id."""

    role = Role.HONEST

    def __init__(self, world: World, peer_id: str) -> None:
        settings = world.settings
        self.world = world
        self.peer_id = peer_id
        self.shard = shard_of(peer_id, settings.num_shards)
        self.link = HostLink(settings, world.random)
        self.traffic = ByteCounts()
        self.joined_at = world.events.now
        self.is_gone = False
        self.last_number = 0
        self.recorded_number = 0  # last sequence number in its directory record
        self.own: dict[bytes, AnnouncedGroup] = {}
        spread = world.random.lognormvariate(math.log(settings.step_s), settings.step_spread)
        self.step_s = min(4 * settings.step_s, max(settings.step_s / 4, spread))
        rate = settings.serve_share * self.link.up_bytes_per_s
        self._serve_all = TokenBucket(rate_per_s=rate, burst=settings.burst_s * rate)
        self._serve_each: dict[str, TokenBucket] = {}

    @property
    def period_s(self) -> float:
        """Seconds between two of its groups."""
        return self.step_s / self.world.settings.groups_per_step

    @property
    def num_budgets(self) -> int:
        return len(self._serve_each)

    def begin(self) -> None:
        """Start; the first group comes at a random time within a period."""
        self.world.events.after(self.world.random.random() * self.period_s, self.make)

    def make(self) -> None:
        """Publish a group and schedule the next."""
        if self.is_gone:
            return
        self.publish(is_valid=True)
        self.world.events.after(self.period_s, self.make)

    def publish(self, *, is_valid: bool) -> AnnouncedGroup:
        self.last_number += 1
        group = AnnouncedGroup(
            self.world.new_id(), self.peer_id, self.shard, self.role, self.last_number,
            created_at=self.world.events.now, num_bytes=self.world.settings.group_bytes, is_valid=is_valid,
        )  # fmt: skip
        self.own[group.id] = group
        if len(self.own) > MAX_OWN:
            del self.own[next(iter(self.own))]
        self.world.announce(group, attempt=0)
        return group

    def find(self, group_ids: Iterable[bytes]) -> set[bytes]:
        """Return which of these groups it can serve."""
        return {group_id for group_id in group_ids if group_id in self.own}

    def answer(self, numbers: Sequence[tuple[int, int]]) -> list[AnnouncedGroup]:
        """Return its own fresh groups in these ranges of sequence numbers."""
        oldest = self.world.events.now - self.world.settings.max_age_s
        found = [
            group
            for group in self.own.values()
            if group.created_at >= oldest and any(first <= group.number <= last for first, last in numbers)
        ]
        return found[-MAX_ANSWERS:]

    def may_serve(self, peer_id: str, num_bytes: float) -> bool:
        """Return whether the upload budgets allow it, and charge them."""
        settings, now = self.world.settings, self.world.events.now
        own = self._serve_each.get(peer_id)
        if own is None:
            rate = settings.serve_bytes_per_s_per_peer
            own = self._serve_each[peer_id] = TokenBucket(rate_per_s=rate, burst=settings.burst_s * rate)
        if own.left(now=now) < num_bytes or self._serve_all.left(now=now) < num_bytes:
            return False
        return own.take(num_bytes, now=now) and self._serve_all.take(num_bytes, now=now)

    def confirmed(self, group_ids: Sequence[bytes]) -> None:
        """Take in the confirmation of a peer."""

    def send(self, other: Peer, kind: Kind, num_bytes: float) -> None:
        """Count bytes sent to another participant."""
        self.traffic.sent[kind] += num_bytes
        other.traffic.received[kind] += num_bytes
