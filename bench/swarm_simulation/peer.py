"""Base of all participants, honest or not: an id, a link, own groups, upload budgets. A node's records of its peers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ftis_node.config.limits import AccessSection, RateLimitsSection
from ftis_node.swarm.rate_limits import Quotas, TokenBucket
from ftis_node.swarm.reputation import Behaviour, Reputation
from ftis_node.swarm.topology import shard_of
from swarm_simulation.announcement import AnnouncedGroup
from swarm_simulation.host_link import ByteCounts, HostLink, Kind
from swarm_simulation.settings import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from swarm_simulation.world import World

MAX_OWN = 256  # own groups kept for queries
MAX_ANSWERS = 64  # announcements in one answer
UNKNOWN = Reputation()
LIMITS = RateLimitsSection()
ACCESS = AccessSection()


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


class PeerTable:
    """Reputations and quotas of the peers that this node interacted with."""

    __slots__ = ("_quotas", "banned_at", "records")

    def __init__(self) -> None:
        self.records: dict[str, Reputation] = {}
        self.banned_at: dict[str, float] = {}  # time of the first ban
        self._quotas = Quotas(LIMITS)

    def is_banned(self, peer_id: str, *, now: float) -> bool:
        record = self.records.get(peer_id)
        return record is not None and record.is_banned(now=now)

    def note(self, peer_id: str, conduct: Behaviour, *, now: float) -> None:
        """Apply one `conduct`."""
        record = self.records.get(peer_id, UNKNOWN).after(conduct, now=now, access=ACCESS)
        self.records[peer_id] = record
        if record.num_bans and peer_id not in self.banned_at:
            self.banned_at[peer_id] = now

    def refused(self, peer_id: str, *, now: float) -> None:
        """Note an invalid group from that peer."""
        self.note(peer_id, Behaviour.REFUSED, now=now)

    def admits(self, sender: str, num_tokens: int, *, now: float) -> bool:
        """Return whether the quota admits a valid group, and charge it."""
        is_new_peer = not self.records.get(sender, UNKNOWN).is_known(now=now)
        if not self._quotas.allows(sender, is_new_peer=is_new_peer, now=now):
            self.note(sender, Behaviour.RATE_LIMITED, now=now)
            return False
        self._quotas.spend(sender, num_tokens, is_new_peer=is_new_peer, now=now)
        self.note(sender, Behaviour.ACCEPTED, now=now)
        return True
