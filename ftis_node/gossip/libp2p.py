"""The swarm over libp2p: announcements by gossipsub, bodies and confirmations by streams, the directory in the DHT.

    announce --> p2pd --> gossipsub topic of the run --> p2pd --> inbox --> announcements
    fetch    --> p2pd --> stream of the run's "fetch" --> p2pd --> stream server --> lookup
    p2pd of either side finds the way: relays, hole punching, and the addresses in Kademlia are its business

Importing this file imports hivemind, and with it torch.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from ftis_node.gossip.base import Fetched, FetchOutcome, GossipLimits
from ftis_node.gossip.calls import PeerCalls
from ftis_node.gossip.inbox import Inbox
from ftis_node.gossip.link import Link
from ftis_node.gossip.membership import Membership
from ftis_node.gossip.names import Service, protocol, topic
from ftis_node.gossip.pulling import pull_items
from ftis_node.gossip.session import Session, Station

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ftis_node.gossip.base import Announcement, PeerConnection, SwarmState
    from ftis_node.gossip.bodies import Pull
    from ftis_node.gossip.settings import NetworkSettings
    from ftis_node.records.identity import Identity


class Libp2pGossip(PeerCalls):
    """One node's part in one run's swarm. Keeps the protocol `base.Gossip`."""

    def __init__(
        self,
        settings: NetworkSettings,
        *,
        identity: Identity,
        run_id: str,
        limits: GossipLimits | None = None,
        num_shards: int = 1,
    ) -> None:
        """Reads the shards 0 to `num_shards` - 1. Raises ValueError for a run id that cannot be part of a name."""
        super().__init__(peer_id=identity.peer_id, run_id=run_id, limits=limits or GossipLimits())
        self._inbox = Inbox(capacity=self._limits.max_queued_announcements, counters=self._counters)
        self._topics = [topic(run_id, shard) for shard in range(num_shards)]
        self._membership = Membership(settings, run_id=run_id, peer_id=self._peer_id, rng=random.Random())
        handlers = {protocol(run_id, service): handler for service, handler in self._services.handlers.items()}
        station = Station(
            settings=settings, identity=identity, limits=self._limits, counters=self._counters, handlers=handlers
        )
        self._link = Link(station, self._work, on_end=self._inbox.close)

    @property
    def addresses(self) -> list[str]:
        """Dialable multiaddrs, as of the last look."""
        return list(self._membership.addresses)

    @property
    def state(self) -> SwarmState:
        """Where this node stands."""
        return self._link.down_state() if self._link.session is None else self._membership.state()

    @property
    def clock_skew_s(self) -> float | None:
        """Another peer's clock less ours, in seconds; None until one was met."""
        return None if self._link.session is None else self._link.session.directory.clock_skew_s

    @property
    def process_id(self) -> int | None:
        """The process id of p2pd, None while it is down."""
        return None if self._link.session is None else self._link.session.process.pid

    async def start(self) -> None:
        """Joins the run's swarm; see `base.Gossip.start`."""
        await self._link.start()

    async def close(self) -> None:
        """Leaves, and leaves nothing running or lying about."""
        await self._link.close()

    async def announce(self, payload: bytes, *, shard: int = 0) -> bool:
        """Tells all members; see `base.Gossip.announce`."""
        self._check_announcement(payload)
        if self._link.session is None:
            self._counters.announcements_unsent += 1
            return False
        try:
            await self._link.session.control.publish(topic(self._run_id, shard), payload)
        except (OSError, EOFError):  # p2pd is going down
            self._counters.announcements_unsent += 1
            return False
        self._counters.announcements_sent += 1
        return True

    def announcements(self) -> AsyncIterator[Announcement]:
        """Announcements of others, until closed. Raises the fault of ours that ended the network, if one did."""
        return self._inbox.drain()

    async def publish_record(self, value: bytes, *, ttl_s: float) -> bool:
        """Puts this node's record into the directory; see `base.Gossip.publish_record`."""
        self._check_record(value, ttl_s=ttl_s)
        if self._link.session is None:
            return False
        try:
            return await self._link.session.directory.publish_record(self._run_id, value, ttl_s=ttl_s)
        except TimeoutError:
            return False

    async def get_record(self, peer_id: str) -> bytes | None:
        """A peer's record in this run's directory."""
        if self._link.session is None:
            return None
        try:
            return await self._link.session.directory.get_record(self._run_id, peer_id)
        except TimeoutError:
            return None

    async def connected_peers(self) -> list[PeerConnection]:
        """Peers with an open connection."""
        try:
            return [] if self._link.session is None else await self._link.session.control.connected_peers()
        except (OSError, EOFError):  # p2pd is going down
            return []

    async def members(self) -> list[str]:
        """Connected members of this run, as of the last look."""
        return [] if self._link.session is None else self._membership.members

    async def _pull(self, peer_id: str, service: Service, request: bytes, *, pull: Pull, timeout_s: float) -> Fetched:
        if self._link.session is None:
            return pull.end(FetchOutcome.UNREACHABLE)
        return await pull_items(
            self._link.session.control,
            peer_id,
            protocol(self._run_id, service),
            request,
            pull=pull,
            idle_s=self._limits.idle_timeout_s,
            timeout_s=timeout_s,
        )

    async def _work(self, session: Session, on_ready: Callable[[], None]) -> None:
        """One life of p2pd: reads the run's topics and keeps this node among its members."""
        async with asyncio.TaskGroup() as group:
            for name in self._topics:
                subscribed = asyncio.Event()
                group.create_task(self._read_topic(session, name, subscribed), name=f"gossip-read {name}")
                await subscribed.wait()
            await self._membership.look(session)
            on_ready()
            group.create_task(self._membership.keep(session), name="gossip-membership")

    async def _read_topic(self, session: Session, name: str, subscribed: asyncio.Event) -> None:
        async with session.control.subscribe(name) as messages:
            subscribed.set()
            async for announcement in messages:
                if announcement.sender == self._peer_id:
                    continue
                if len(announcement.payload) > self._limits.max_announcement_bytes:
                    self._counters.announcements_refused += 1
                    continue
                self._inbox.put(announcement)
