"""The swarm over libp2p: announcements over gossipsub, bodies and confirmations over streams, the directory in the DHT.

    announce --> p2pd --> gossipsub topic of the run --> p2pd --> announcement queue --> announcements
    fetch    --> p2pd --> stream of the run's "fetch" --> p2pd --> stream server --> lookup

p2pd finds the path between two nodes: relays, hole punching, addresses in the DHT. Importing this file imports
hivemind.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import replace
from typing import TYPE_CHECKING

from ftis_node.errors import RecordError
from ftis_node.gossip.connection_state import DUPLICATE_IDENTITY, with_duplicate_identity
from ftis_node.gossip.encryption import NO_CIPHER, SecretCipher
from ftis_node.gossip.interface import Fetched, FetchOutcome, GossipLimits, GossipMessage, SwarmPhase
from ftis_node.gossip.membership import SEEN_TTLS, Membership
from ftis_node.gossip.multiaddr import Reachability, reachability_of
from ftis_node.gossip.p2pd.session import P2pdConfig, Session
from ftis_node.gossip.p2pd.supervisor import P2pdSupervisor
from ftis_node.gossip.pubsub import AnnouncementQueue, Subscriptions
from ftis_node.gossip.services import PeerCalls
from ftis_node.gossip.streams import pull_items
from ftis_node.gossip.wire_format import RpcService, protocol, topic
from ftis_node.swarm.peer_guard import Place

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    from ftis_node.gossip.interface import PeerConnection, SwarmState
    from ftis_node.gossip.settings import NetworkSettings
    from ftis_node.gossip.wire_format import ItemCollector
    from ftis_node.records.identity import Identity


logger = logging.getLogger(__name__)

SECRET_HINT = "only holders of the same secret are met: is `swarm.secret_file` the same file everywhere?"


class Libp2pGossip(PeerCalls):
    """Implementation of `interface.Gossip` over a p2pd child process."""

    def __init__(
        self,
        settings: NetworkSettings,
        *,
        identity: Identity,
        run_id: str,
        limits: GossipLimits | None = None,
        num_shards: int = 1,
        secret: bytes | None = None,
    ) -> None:
        """Read all of the run's `num_shards` until `read_shards` is called. With a `secret` only its holders can join.

        Raises ValueError for an invalid run id, and for a secret of fewer than 32 bytes.
        """
        super().__init__(peer_id=identity.peer_id, run_id=run_id, limits=limits or GossipLimits())
        self._queue = AnnouncementQueue(capacity=self._limits.max_queued_announcements, counters=self._counters)
        self._cipher = NO_CIPHER if secret is None else SecretCipher(secret, run_id=run_id)
        self._run_name = self._cipher.wire_name(run_id)
        self._settings = settings
        self._duplicate_seen_at: float | None = None
        self._subscriptions = Subscriptions(range(num_shards), on_message=self._on_message)
        self._membership = Membership(
            settings,
            run_id=self._run_name,
            peer_id=self._peer_id,
            rng=random.Random(),
            num_shards=num_shards,
            guard=self._guard,
        )
        handlers = {protocol(self._run_name, service): handler for service, handler in self._services.handlers.items()}
        config = P2pdConfig(
            settings=settings,
            identity=identity,
            limits=self._limits,
            counters=self._counters,
            handlers=handlers,
            admission=self._admission,
            cipher=self._cipher,
            guard=self._guard,
            on_duplicate_identity=self._note_duplicate_identity,
        )
        self._supervisor = P2pdSupervisor(config, self._work, on_end=self._queue.close)

    @property
    def addresses(self) -> list[str]:
        """Return the multiaddrs at which peers can dial this node, as of the last poll."""
        return list(self._membership.addresses)

    @property
    def state(self) -> SwarmState:
        state = self._supervisor.down_state() if self._supervisor.session is None else self._membership.state()
        if state.state is SwarmPhase.STANDALONE and self._cipher is not NO_CIPHER:
            state = replace(state, reason=f"{state.reason}; {SECRET_HINT}")
        return with_duplicate_identity(state) if self._has_duplicate_identity() else state

    @property
    def clock_skew_s(self) -> float | None:
        """See `interface.Gossip.clock_skew_s`."""
        return None if self._supervisor.session is None else self._supervisor.session.directory.clock_skew_s

    @property
    def reachability(self) -> Reachability:
        """Return how peers can dial this node, as of the last poll."""
        return reachability_of(self.addresses)

    @property
    def process_id(self) -> int | None:
        """Return the process id of p2pd, None while it is down."""
        return None if self._supervisor.session is None else self._supervisor.session.process.pid

    async def start(self) -> None:
        """See `interface.Gossip.start`."""
        await self._supervisor.start()

    async def close(self) -> None:
        await self._supervisor.close()

    async def announce(self, payload: bytes, *, shard: int = 0) -> bool:
        """See `interface.Gossip.announce`."""
        self._check_announcement(payload)
        if self._supervisor.session is None:
            self._counters.announcements_unsent += 1
            return False
        try:
            name = topic(self._run_name, shard)
            ciphertext = self._cipher.encrypt(payload, "announcement", self._peer_id, name)
            await self._supervisor.session.client.publish(name, ciphertext)
        except (OSError, EOFError):  # p2pd is going down
            self._counters.announcements_unsent += 1
            return False
        self._counters.announcements_sent += 1
        return True

    async def read_shards(self, shards: Collection[int]) -> None:
        """See `interface.Gossip.read_shards`."""
        self._membership.read_shards = frozenset(shards)
        await self._subscriptions.choose(shards)

    def announcements(self) -> AsyncIterator[GossipMessage]:
        """See `interface.Gossip.announcements`. Raises the internal error that ended the network, if one did."""
        return self._queue.drain()

    async def publish_record(self, value: bytes, *, ttl_s: float) -> bool:
        """See `interface.Gossip.publish_record`."""
        self._check_record(value, ttl_s=ttl_s)
        if self._supervisor.session is None:
            return False
        try:
            return await self._supervisor.session.directory.publish_record(self._run_name, value, ttl_s=ttl_s)
        except TimeoutError:
            return False

    async def publish_manifest(self, canonical: bytes, *, ttl_s: float) -> bool:
        """See `interface.Gossip.publish_manifest`."""
        if self._supervisor.session is None or self._run_name != self._run_id:
            return False
        try:
            return await self._supervisor.session.directory.publish_manifest(self._run_id, canonical, ttl_s=ttl_s)
        except TimeoutError:
            return False

    async def get_record(self, peer_id: str) -> bytes | None:
        if self._supervisor.session is None:
            return None
        try:
            return await self._supervisor.session.directory.get_record(self._run_name, peer_id)
        except TimeoutError:
            return None

    async def connected_peers(self) -> list[PeerConnection]:
        try:
            return [] if self._supervisor.session is None else await self._supervisor.session.client.connected_peers()
        except (OSError, EOFError):  # p2pd is going down
            return []

    async def members(self) -> list[str]:
        """Return the connected members of this run, as of the last poll."""
        return [] if self._supervisor.session is None else self._membership.members

    async def known_members(self) -> list[str]:
        return self._membership.known_members()

    async def all_read_batches(self) -> bool:
        return self._supervisor.session is not None and self._membership.all_read_batches()

    async def shard_members(self) -> list[str]:
        """Return the other members of this node's own shard, as of the last poll."""
        return self._membership.shard_members

    async def _pull(
        self, peer_id: str, service: RpcService, request: bytes, *, items: ItemCollector, timeout_s: float
    ) -> Fetched:
        if self._supervisor.session is None:
            return items.end(FetchOutcome.UNREACHABLE)
        return await pull_items(
            self._supervisor.session.caller,
            peer_id,
            protocol(self._run_name, service),
            request,
            items=items,
            idle_s=self._limits.idle_timeout_s,
            timeout_s=timeout_s,
        )

    async def _work(self, session: Session, on_ready: Callable[[], None]) -> None:
        """Run one p2pd session: read the run's topics and keep this node connected to members."""
        async with asyncio.TaskGroup() as group:
            group.create_task(
                self._subscriptions.follow(lambda shard: session.client.subscribe(topic(self._run_name, shard))),
                name="gossip-topics",
            )
            await self._subscriptions.settled()
            await self._membership.poll(session)
            on_ready()
            group.create_task(self._membership.keep(session), name="gossip-membership")

    def _note_duplicate_identity(self) -> None:
        if self._duplicate_seen_at is None:
            logger.warning("%s (peer id %s)", DUPLICATE_IDENTITY, self._peer_id)
        self._duplicate_seen_at = asyncio.get_running_loop().time()

    def _has_duplicate_identity(self) -> bool:
        """Return whether a directory entry of another node under this identity was seen recently."""
        seen_at, kept_s = self._duplicate_seen_at, SEEN_TTLS * self._settings.member_ttl_s
        return seen_at is not None and asyncio.get_running_loop().time() < seen_at + kept_s

    def _on_message(self, shard: int, message: GossipMessage) -> None:
        if message.sender == self._peer_id:
            return
        with self._guard.work_for(message.sender, Place.MESSAGE):
            self._receive(shard, message)

    def _receive(self, shard: int, message: GossipMessage) -> None:
        try:
            payload = self._decrypted(message, topic(self._run_name, shard))
        except RecordError as error:
            self._refuse_announcement(message.sender, error)
            return
        self._queue.put(GossipMessage(message.sender, payload, shard))

    def _decrypted(self, message: GossipMessage, name: str) -> bytes:
        """Return the decrypted payload. Raises RecordError if it is too large or cannot be decrypted."""
        if len(message.payload) > self._limits.max_announcement_bytes + self._cipher.overhead_bytes:
            raise RecordError("size", f"an announcement of {len(message.payload)} bytes")
        return self._cipher.decrypt(message.payload, "announcement", message.sender, name)
