"""Base of peers that request: pulls, queries and confirmations between two peers, with costs and failures."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ftis_node.swarm.pull_queue import PullQueue, PullRequest
from ftis_node.swarm.reputation import Behaviour
from ftis_node.swarm.sequence import SequenceGap, SequenceTracker
from swarm_simulation.announcement import AnnouncedGroup, AnnouncementEvent
from swarm_simulation.host_link import Kind
from swarm_simulation.peer_table import PeerTable
from swarm_simulation.settings import Role
from swarm_simulation.world import Peer, World

NUM_OTHERS = 2  # members to ask for a group that its sender does not serve


class RequestingPeer(Peer, ABC):
    """One participant that sends requests; a subclass decides what it requests, and handles what it receives."""

    confirms = True

    def __init__(self, world: World, peer_id: str) -> None:
        super().__init__(world, peer_id)
        self.queue = PullQueue(capacity=world.settings.max_wants)
        self.peer_table = PeerTable()
        self.num_pulls = 0  # in flight
        self.is_awake = False
        self.busy_until: dict[str, float] = {}
        self.senders_with_gaps: dict[str, None] = {}  # to query at the next tick

    @abstractmethod
    def receive(self, group: AnnouncedGroup, call: AnnouncementEvent, now: float) -> None:
        """Handle an announcement."""

    @abstractmethod
    def accept(self, group: AnnouncedGroup, *, handed_over_by: Peer) -> bool:
        """Validate and store a body; return whether it was accepted."""

    @abstractmethod
    def act(self) -> None:
        """Start as many pulls as are needed and allowed."""

    def wake(self, delay_s: float) -> None:
        """Schedule `act`."""
        if not self.is_awake:
            self.is_awake = True
            self.world.events.after(delay_s, self.act)

    def rest(self, peer_id: str, seconds: float) -> None:
        """Pause requests to a peer."""
        self.busy_until[peer_id] = self.world.events.now + seconds
        self.wake(seconds)

    def pull(self, request: PullRequest) -> None:
        """Send a request; it ends in `_arrived`, `_busy` or `_failed`."""
        settings, events = self.world.settings, self.world.events
        source = self.world.peers.get(request.source.peer_id)
        if source is None:
            events.after(settings.dial_timeout_s, self._failed, request)
            return
        self.send(source, Kind.BODIES, settings.request_bytes + settings.id_bytes * len(request.items))
        events.after(self.link.latency_s + source.link.latency_s, self._serve, request, source)

    def _serve(self, request: PullRequest, source: Peer) -> None:
        settings, events = self.world.settings, self.world.events
        if source.is_gone or source.role is Role.SILENT:
            events.after(settings.pull_timeout_s, self._failed, request)
            return
        found = source.find([item.id for item in request.items])
        num_bytes = float(sum(item.num_bytes for item in request.items if item.id in found))
        back_s = self.link.latency_s + source.link.latency_s
        if num_bytes and not source.may_serve(self.peer_id, num_bytes):
            events.after(back_s, self._busy, request)
            return
        source.send(self, Kind.BODIES, num_bytes + settings.request_bytes)
        took_s = source.link.transfer(self.link, num_bytes, now=events.now)
        events.after(took_s, self._arrived, request, source, found)

    def _busy(self, request: PullRequest) -> None:
        self.num_pulls -= 1
        self.queue.put_back(request)
        self.rest(request.source.peer_id, self.world.settings.busy_s)

    def _failed(self, request: PullRequest) -> None:
        self.num_pulls -= 1
        self.peer_table.note(request.source.peer_id, Behaviour.PULL_FAILED, now=self.world.events.now)
        self._missed(request, [item.id for item in request.items])
        self.rest(request.source.peer_id, self.world.settings.failed_s)
        self.wake(0.0)

    def _arrived(self, request: PullRequest, source: Peer, found: set[bytes]) -> None:
        self.num_pulls -= 1
        if self.is_gone:
            return
        accepted = []
        for item in request.items:
            group = self.world.groups.get(item.id)
            if item.id in found and group is not None and self.accept(group, handed_over_by=source):
                self.world.pulled(group, self.role)
                accepted.append(item.id)
        missing = [item.id for item in request.items if item.id not in found]
        if missing:
            self.peer_table.note(request.source.peer_id, Behaviour.PULL_FAILED, now=self.world.events.now)
            self._missed(request, missing)
        if accepted and self.confirms:
            self._confirm(source, accepted)
        self.wake(0.0)

    def _missed(self, request: PullRequest, missing: list[bytes]) -> None:
        members = [peer_id for peer_id in self.world.some_members(self.shard, NUM_OTHERS) if peer_id != self.peer_id]
        self.queue.missed(request, missing=missing, others=members)

    def _confirm(self, source: Peer, accepted: list[bytes]) -> None:
        """Confirm groups to the peer that served them and to their sender."""
        settings = self.world.settings
        recipients: dict[Peer, list[bytes]] = {source: accepted}
        for group_id in accepted:
            maker = self.world.peers.get(self.world.groups[group_id].sender)
            if maker is not None and maker is not source:
                recipients.setdefault(maker, []).append(group_id)
        for peer, group_ids in recipients.items():
            if not peer.is_gone:
                self.send(peer, Kind.CONFIRMATIONS, settings.request_bytes + settings.id_bytes * len(group_ids))
                delay_s = self.link.latency_s + peer.link.latency_s
                self.world.events.after(delay_s, peer.confirmed, group_ids)

    def ask(self, sender: str, tracker: SequenceTracker) -> None:
        """Query a sender for missing sequence numbers."""
        settings, events = self.world.settings, self.world.events
        source, gaps = self.world.peers.get(sender), tracker.gaps
        if source is None:
            for gap in gaps:
                tracker.note_query(gap, is_final=False)
            return
        self.send(source, Kind.QUESTIONS, settings.request_bytes)
        events.after(2 * (self.link.latency_s + source.link.latency_s), self._answered, source, tracker, gaps)

    def _answered(self, source: Peer, tracker: SequenceTracker, gaps: tuple[SequenceGap, ...]) -> None:
        if self.is_gone:
            return
        if source.is_gone or source.role is Role.SILENT:
            for gap in gaps:
                tracker.note_query(gap, is_final=False)
            self.senders_with_gaps[source.peer_id] = None
            return
        answer = source.answer([(gap.first, gap.last) for gap in gaps])
        settings = self.world.settings
        source.send(self, Kind.QUESTIONS, settings.request_bytes + settings.answered_announcement_bytes * len(answer))
        for group in answer:
            if group.call is not None:
                self.receive(group, group.call, self.world.events.now)
        for gap in gaps:
            tracker.note_query(gap, is_final=True)
