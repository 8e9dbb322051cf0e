"""The participants of a simulated swarm: those at the start, and churn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ftis_node.swarm.topology import shard_of
from swarm_simulation.attackers import KINDS
from swarm_simulation.host_link import Kind
from swarm_simulation.node import SimulatedNode
from swarm_simulation.observed import ObservedNode
from swarm_simulation.settings import Role
from swarm_simulation.world import Peer, World

NUM_ASKED_BY_NEWCOMER: Final = 3


class Population:
    """Creates and removes the participants of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._num_made = 0

    def start(self) -> None:
        """Create the participants of the start, which already know each other."""
        world = self._world
        num_attackers = round(world.settings.num_nodes * world.settings.attackers_share)
        num_honest = world.settings.num_nodes - num_attackers
        kinds: list[Callable[[World, str], Peer]] = [SimulatedNode] * num_honest
        kinds += [KINDS[number % len(KINDS)] for number in range(num_attackers)]
        made: list[Peer] = []
        for kind in kinds:
            peer_id = self._new_peer_id()
            if not self._is_simulated(peer_id):
                world.num_elsewhere += 1
                continue
            is_observed = kind is SimulatedNode and len(made) < world.settings.num_observed
            made.append(self._make(ObservedNode if is_observed else kind, peer_id))
        for views_of_shard in world.member_views:
            views_of_shard.begin()
        for peer in made:
            peer.begin()
        world.events.after(world.settings.listing_period_s, world.list_members)
        self._wait_for_churn()

    def _new_peer_id(self) -> str:
        self._num_made += 1
        return f"12D3Koo-{self._world.settings.seed}-{self._num_made}"

    def _is_simulated(self, peer_id: str) -> bool:
        settings = self._world.settings
        return shard_of(peer_id, settings.num_shards) < settings.num_simulated_shards

    def _make(self, kind: Callable[[World, str], Peer], peer_id: str) -> Peer:
        world = self._world
        peer = kind(world, peer_id)
        world.peers[peer.peer_id] = peer
        world.member_views[peer.shard].join(peer.peer_id)
        return peer

    def _wait_for_churn(self) -> None:
        world = self._world
        rate_per_s = (world.settings.num_nodes - world.num_elsewhere) * world.settings.leave_share_per_hour / 3600
        if rate_per_s:
            world.events.after(world.random.expovariate(rate_per_s), self._churn)

    def _churn(self) -> None:
        """Remove one honest node without notice, and add another."""
        world = self._world
        honest = honest_nodes(world)
        if len(honest) > 1:
            node = honest[world.random.randrange(len(honest))]
            node.is_gone = True
            node.shard_reader.leave()
            del world.peers[node.peer_id]
            world.member_views[node.shard].leave(node.peer_id, now=world.events.now)
        while not self._is_simulated(peer_id := self._new_peer_id()):
            continue
        newcomer = self._make(SimulatedNode, peer_id)
        assert isinstance(newcomer, SimulatedNode)
        newcomer.begin()
        self._catch_up(newcomer)
        self._wait_for_churn()

    def _catch_up(self, newcomer: SimulatedNode) -> None:
        """Query a few members of the shard for recent groups."""
        world, settings = self._world, self._world.settings
        for peer_id in world.some_members(newcomer.shard, NUM_ASKED_BY_NEWCOMER):
            peer = world.peers.get(peer_id)
            if peer is None or peer is newcomer:
                continue
            answer = peer.answer([(1, peer.last_number)])
            newcomer.send(peer, Kind.QUESTIONS, settings.request_bytes)
            num_bytes = settings.request_bytes + settings.answered_announcement_bytes * len(answer)
            peer.send(newcomer, Kind.QUESTIONS, num_bytes)
            for group in answer:
                if group.call is not None:
                    newcomer.receive(group, group.call, world.events.now)


def honest_nodes(world: World) -> list[SimulatedNode]:
    """Return the present honest nodes."""
    return [peer for peer in world.peers.values() if isinstance(peer, SimulatedNode) and peer.role is Role.HONEST]
