"""Pulls, queries and confirmations between two peers: their costs, durations and failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.swarm.reputation import Behaviour
from swarm_simulation.host_link import Kind
from swarm_simulation.settings import Role

if TYPE_CHECKING:
    from ftis_node.swarm.pull_queue import PullRequest
    from ftis_node.swarm.sequence import SequenceGap, SequenceTracker
    from swarm_simulation.node import SimulatedNode
    from swarm_simulation.peer import Peer
    from swarm_simulation.world import World

NUM_OTHERS = 2  # members to ask for a group that its sender does not serve


class Transfers:
    """Simulates requests between two peers."""

    def __init__(self, world: World) -> None:
        self._world = world

    def pull(self, node: SimulatedNode, request: PullRequest) -> None:
        """Send a request; it ends in `_arrived`, `_busy` or `_failed`."""
        settings, events = self._world.settings, self._world.events
        source = self._world.peers.get(request.source.peer_id)
        if source is None:
            events.after(settings.dial_timeout_s, self._failed, node, request)
            return
        node.send(source, Kind.BODIES, settings.request_bytes + settings.id_bytes * len(request.items))
        events.after(node.link.latency_s + source.link.latency_s, self._serve, node, request, source)

    def _serve(self, node: SimulatedNode, request: PullRequest, source: Peer) -> None:
        settings, events = self._world.settings, self._world.events
        if source.is_gone or source.role is Role.SILENT:
            events.after(settings.pull_timeout_s, self._failed, node, request)
            return
        found = source.find([item.id for item in request.items])
        num_bytes = float(sum(item.num_bytes for item in request.items if item.id in found))
        back_s = node.link.latency_s + source.link.latency_s
        if num_bytes and not source.may_serve(node.peer_id, num_bytes):
            events.after(back_s, self._busy, node, request)
            return
        source.send(node, Kind.BODIES, num_bytes + settings.request_bytes)
        took_s = source.link.transfer(node.link, num_bytes, now=events.now)
        events.after(took_s, self._arrived, node, request, source, found)

    def _busy(self, node: SimulatedNode, request: PullRequest) -> None:
        node.num_pulls -= 1
        node.queue.put_back(request)
        node.rest(request.source.peer_id, self._world.settings.busy_s)

    def _failed(self, node: SimulatedNode, request: PullRequest) -> None:
        node.num_pulls -= 1
        node.peer_table.note(request.source.peer_id, Behaviour.PULL_FAILED, now=self._world.events.now)
        self._missed(node, request, [item.id for item in request.items])
        node.rest(request.source.peer_id, self._world.settings.failed_s)
        node.wake(0.0)

    def _arrived(self, node: SimulatedNode, request: PullRequest, source: Peer, found: set[bytes]) -> None:
        node.num_pulls -= 1
        if node.is_gone:
            return
        accepted = []
        for item in request.items:
            group = self._world.groups.get(item.id)
            if item.id in found and group is not None and node.accept(group, handed_over_by=source):
                self._world.pulled(group, node)
                accepted.append(item.id)
        missing = [item.id for item in request.items if item.id not in found]
        if missing:
            node.peer_table.note(request.source.peer_id, Behaviour.PULL_FAILED, now=self._world.events.now)
            self._missed(node, request, missing)
        if accepted and node.confirms:
            self._confirm(node, source, accepted)
        node.wake(0.0)

    def _missed(self, node: SimulatedNode, request: PullRequest, missing: list[bytes]) -> None:
        members = [peer_id for peer_id in self._world.some_members(node.shard, NUM_OTHERS) if peer_id != node.peer_id]
        node.queue.missed(request, missing=missing, others=members)

    def _confirm(self, node: SimulatedNode, source: Peer, accepted: list[bytes]) -> None:
        """Confirm groups to the peer that served them and to their sender."""
        settings = self._world.settings
        recipients: dict[Peer, list[bytes]] = {source: accepted}
        for group_id in accepted:
            maker = self._world.peers.get(self._world.groups[group_id].sender)
            if maker is not None and maker is not source:
                recipients.setdefault(maker, []).append(group_id)
        for peer, group_ids in recipients.items():
            if not peer.is_gone:
                node.send(peer, Kind.CONFIRMATIONS, settings.request_bytes + settings.id_bytes * len(group_ids))
                delay_s = node.link.latency_s + peer.link.latency_s
                self._world.events.after(delay_s, peer.confirmed, group_ids)

    def ask(self, node: SimulatedNode, sender: str, heard: SequenceTracker) -> None:
        """Query a sender for missing sequence numbers."""
        settings, events = self._world.settings, self._world.events
        source, gaps = self._world.peers.get(sender), heard.gaps
        if source is None:
            for gap in gaps:
                heard.note_query(gap, is_final=False)
            return
        node.send(source, Kind.QUESTIONS, settings.request_bytes)
        events.after(2 * (node.link.latency_s + source.link.latency_s), self._answered, node, source, heard, gaps)

    def _answered(
        self, node: SimulatedNode, source: Peer, heard: SequenceTracker, gaps: tuple[SequenceGap, ...]
    ) -> None:
        if node.is_gone:
            return
        if source.is_gone or source.role is Role.SILENT:
            for gap in gaps:
                heard.note_query(gap, is_final=False)
            node.gap_stays(source.peer_id)
            return
        answer = source.answer([(gap.first, gap.last) for gap in gaps])
        settings = self._world.settings
        source.send(node, Kind.QUESTIONS, settings.request_bytes + settings.answered_announcement_bytes * len(answer))
        for group in answer:
            if group.call is not None:
                node.receive(group, group.call, self._world.events.now)
        for gap in gaps:
            heard.note_query(gap, is_final=True)
