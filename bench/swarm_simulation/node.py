"""An honest node: announcements, pulls, buffer, steps. All decisions are made by the policies of `ftis_node/swarm`.

    announcement --receive--> SequenceTracker, PullQueue --act: pull_demand, next_request--> transfers --> buffer
    buffer       --step-->    the groups of a step
    own group -> BackoffTable --tick--> announced again
    gaps         --tick-->    queries

It reads the directory every 30 s of virtual time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ftis_node.backoff import BackoffTable, doubling
from ftis_node.replay.group_choice import Candidate, choose_foreign
from ftis_node.swarm.demand import PullDemand, pull_demand
from ftis_node.swarm.rate_limits import ShareCap, TokenBucket
from ftis_node.swarm.reputation import Behaviour
from ftis_node.swarm.sequence import SequenceTracker
from swarm_simulation.announcement import AnnouncedGroup, AnnouncementEvent
from swarm_simulation.settings import NUM_VIEWS
from swarm_simulation.shard_reader import FIRST_INTERVAL_S, ShardReader
from swarm_simulation.transfers import RequestingPeer
from swarm_simulation.world import Peer, World

ALL = PullDemand(need=None, takes_assigned=True)


class SimulatedNode(RequestingPeer):
    """One honest node."""

    pulls_all = False

    def __init__(self, world: World, peer_id: str) -> None:
        super().__init__(world, peer_id)
        settings = world.settings
        self.view = world.random.randrange(NUM_VIEWS)  # view of its shard's members
        self.trackers: dict[str, SequenceTracker] = {}
        self.unconfirmed = BackoffTable[bytes](doubling(settings.first_wait_s), capacity=1024)
        self.shard_reader = ShardReader(self)
        self.ready: dict[bytes, Candidate] = {}  # remote groups in the buffer
        self.held: dict[bytes, AnnouncedGroup] = {}  # pulled and still fresh
        self.num_announcements = 0
        self.announcement_bytes = 0.0  # received and forwarded
        self.num_steps = self.num_full_steps = 0
        self.top_share = 0.0  # maximum use of its buffer cap by one peer
        self.policy_s = 0.0  # measured if the node is observed
        self._per_sender: Counter[str] = Counter()
        self._share_cap = ShareCap()
        self._pull_bytes = TokenBucket(rate_per_s=settings.pull_bytes_per_s, burst=8 * settings.pull_bytes_per_s)
        self._arrivals = 0
        self._demand = ALL

    def begin(self) -> None:
        """Start; its periodic tasks begin at random times."""
        super().begin()
        events, settings, random = self.world.events, self.world.settings, self.world.random
        self.shard_reader.begin()
        events.after(FIRST_INTERVAL_S, self._adjust_shards)
        self._check_demand()
        events.after(random.random() * settings.tick_s, self.tick)
        events.after(random.random() * settings.directory_s, self.directory)
        if not self.pulls_all:
            events.after(random.random() * self.step_s, self.step)

    def restart_counters(self) -> None:
        """End the warm-up."""
        self.traffic.reset()
        self.announcement_bytes = self.policy_s = 0.0
        self.num_announcements = self.num_steps = self.num_full_steps = 0

    def publish(self, *, is_valid: bool) -> AnnouncedGroup:
        """Announce a group and wait for its confirmation."""
        group = super().publish(is_valid=is_valid)
        self.unconfirmed.failed(group.id, now=self.world.events.now)
        return group

    def confirmed(self, group_ids: Sequence[bytes]) -> None:
        for group_id in group_ids:
            self.unconfirmed.discard(group_id)

    def find(self, group_ids: Iterable[bytes]) -> set[bytes]:
        """Return its own groups and the pulled ones among these."""
        return {group_id for group_id in group_ids if group_id in self.own or group_id in self.held}

    def receive(self, group: AnnouncedGroup, call: AnnouncementEvent, now: float) -> None:
        """Handle an announcement, received directly or in an answer."""
        self.num_announcements += 1
        sender = group.sender
        record = self.peer_table.records.get(sender)
        if sender == self.peer_id or (record is not None and record.is_banned(now=now)):
            return
        tracker = self.trackers.get(sender)
        if tracker is None:
            tracker = self.trackers[sender] = SequenceTracker(at=now)
        elif group.number > tracker.highest + 1:
            self.senders_with_gaps[sender] = None
        tracker.note(group.number, at=now)
        if group.id in self.held:
            return
        is_assigned = self._demand.takes_assigned and call.concerns(self.shard) and self.is_assigned(call)
        self.queue.add(group.assigned_item if is_assigned else group.want, holder=sender)
        if is_assigned or self._demand.need != 0:
            self.wake(self.world.settings.gather_s)

    def is_assigned(self, call: AnnouncementEvent) -> bool:
        """Return whether this node pulls the group, by its view of the sender's shard."""
        return self.world.settings.with_assignment and call.is_assigned(self.peer_id, view=self.view)

    def act(self) -> None:
        """Start as many pulls as are needed and allowed."""
        self.is_awake = False
        now, settings = self.world.events.now, self.world.settings
        while self.num_pulls < settings.pulls_in_flight and not self.is_gone:
            if (wait_s := self._pull_bytes.wait_s(settings.group_bytes, now=now)) > 0:
                self.wake(max(wait_s, settings.gather_s))
                return
            self._check_demand()
            request = self.queue.next_request(
                most=settings.pull_batch,
                need=self._demand.need,
                max_bytes=settings.pull_batch_bytes,
                may_ask=self._may_ask,
            )
            if request is None:
                return
            self.num_pulls += 1
            self._pull_bytes.spend(sum(want.num_bytes for want in request.items), now=now)
            self.pull(request)

    def accept(self, group: AnnouncedGroup, *, handed_over_by: Peer) -> bool:
        """Validate and store a body; return whether it was accepted."""
        now = self.world.events.now
        self.queue.arrived([group.id])
        if not group.is_valid:
            self.peer_table.refused(handed_over_by.peer_id, now=now)
            return False
        if not self.peer_table.admits(group.sender, self.world.settings.group_tokens, now=now):
            return False
        self.held[group.id] = group
        self._store(group)
        return True

    def step(self) -> None:
        """Let the learner take its remote groups."""
        if self.is_gone:
            return
        now, settings = self.world.events.now, self.world.settings
        for group_id in [one.id for one in self.ready.values() if now - one.created_at > settings.max_age_s]:
            self._drop(group_id)
        chosen = choose_foreign(list(self.ready.values()), settings.groups_per_step)
        for candidate in chosen:
            self._drop(candidate.id)
            self.peer_table.note(candidate.sender, Behaviour.CONTRIBUTED, now=now)
        self.num_steps += 1
        self.num_full_steps += len(chosen) == settings.groups_per_step
        self.wake(0.0)
        self.world.events.after(self.step_s, self.step)

    def tick(self) -> None:
        """Announce unconfirmed groups again; query missing ones."""
        if self.is_gone:
            return
        now = self.world.events.now
        for group_id, attempt in self.unconfirmed.due(now=now):
            if attempt < self.world.settings.max_attempts:
                self.unconfirmed.failed(group_id, now=now)
            else:
                self.unconfirmed.discard(group_id)
            if group_id in self.own:
                self.world.announce(self.own[group_id], attempt=attempt)
        for sender in self.senders_with_gaps:
            if self.trackers[sender].gaps and not self.peer_table.is_banned(sender, now=now):
                self.ask(sender, self.trackers[sender])
        self.senders_with_gaps.clear()
        self.world.events.after(self.world.settings.tick_s, self.tick)

    def directory(self) -> None:
        """Renew the directory record, read those of the shard's members, and adjust the number of shards read."""
        if self.is_gone:
            return
        world, now = self.world, self.world.events.now
        self.recorded_number = self.last_number
        members = world.member_views[self.shard].views[self.view]
        for peer_id in sorted(members):  # sorted, so that a seed gives the same run in any process
            tracker = self.trackers.get(peer_id)
            member = world.peers.get(peer_id)
            if tracker is not None and member is not None and member.recorded_number > tracker.highest:
                tracker.note_tail(member.recorded_number)
                self.senders_with_gaps[peer_id] = None
        world.count_directory(self.traffic, num_members=len(members))
        self._drop_expired(now)
        self.shard_reader.adjust(self.num_announcements)
        world.events.after(world.settings.directory_s, self.directory)

    def _adjust_shards(self) -> None:
        if not self.is_gone:
            self.shard_reader.adjust(self.num_announcements)

    def _check_demand(self) -> None:
        if self.pulls_all:
            return
        settings = self.world.settings
        self._demand = pull_demand(
            "auto",
            num_members=self.world.num_peers - 1,
            per_step=settings.groups_per_step,
            num_ready=len(self.ready),
            num_in_flight=self.queue.num_in_flight,
        )

    def _may_ask(self, peer_id: str) -> bool:
        now = self.world.events.now
        return self.busy_until.get(peer_id, 0.0) <= now and not self.peer_table.is_banned(peer_id, now=now)

    def _store(self, group: AnnouncedGroup) -> None:
        """Store a group. A sender at its cap and a full buffer lose their oldest group."""
        settings = self.world.settings
        self._arrivals += 1
        candidate = Candidate(
            id=group.id, sender=group.sender, own=False, arrival=self._arrivals,
            created_at=group.created_at, policy_version=0, problem=group.id,
        )  # fmt: skip
        places = self._share_cap.places(
            group.sender, num_neighbors=self.world.num_peers - 1, capacity=settings.max_ready_groups
        )
        if self._per_sender[group.sender] >= places:
            self._drop(next(one.id for one in self.ready.values() if one.sender == group.sender))
        if len(self.ready) >= settings.max_ready_groups:
            self._drop(min(self.ready.values(), key=lambda one: (one.created_at, one.arrival)).id)
        self.ready[group.id] = candidate
        self._per_sender[group.sender] += 1
        self.top_share = max(self.top_share, self._per_sender[group.sender] / places)

    def _drop(self, group_id: bytes) -> None:
        candidate = self.ready.pop(group_id)
        self._per_sender[candidate.sender] -= 1
        if not self._per_sender[candidate.sender]:
            del self._per_sender[candidate.sender]

    def _drop_expired(self, now: float) -> None:
        """Drop expired groups, and peers not seen for that long."""
        settings = self.world.settings
        oldest = now - settings.max_age_s
        self.queue.drop_older(oldest)
        for peer_id in [peer_id for peer_id, tracker in self.trackers.items() if tracker.at < oldest]:
            del self.trackers[peer_id]
            self.senders_with_gaps.pop(peer_id, None)
        for group_id in [group_id for group_id, group in self.held.items() if group.created_at < oldest]:
            del self.held[group_id]
        self.busy_until = {peer_id: until for peer_id, until in self.busy_until.items() if until > now}
