"""The swarm over libp2p: announcements over gossipsub, envelopes and confirmations over streams, directory in the DHT.

    announce --> p2pd --> gossipsub topic of the run --> p2pd --> announcement queue --> announcements
    fetch    --> p2pd --> stream of the run's "fetch" --> p2pd --> stream server --> lookup

Importing this file imports hivemind.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace

from ftis_node.errors import RecordError
from ftis_node.gossip.encryption import NO_CIPHER, SecretCipher
from ftis_node.gossip.frames import ItemCollector
from ftis_node.gossip.interface import Gossip
from ftis_node.gossip.membership import SEEN_TTLS, Membership
from ftis_node.gossip.names import RpcService, protocol, topic
from ftis_node.gossip.p2pd.session import Session
from ftis_node.gossip.p2pd.supervisor import P2pdSupervisor
from ftis_node.gossip.pubsub import Subscriptions
from ftis_node.gossip.session_parts import SessionParts
from ftis_node.gossip.settings import NetworkSettings
from ftis_node.gossip.types import (
    Fetched,
    FetchOutcome,
    GossipLimits,
    GossipMessage,
    PeerConnection,
    SwarmPhase,
    SwarmState,
)
from ftis_node.records.identity import Identity
from ftis_node.swarm.peer_guard import Place

logger = logging.getLogger(__name__)

SECRET_HINT = "only holders of the same secret are met: is `swarm.secret_file` the same file everywhere?"


class Libp2pGossip(Gossip):
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
        """Read all of the run's shards until `read_shards` is called. With a `secret` only its holders can join."""
        super().__init__(peer_id=identity.peer_id, run_id=run_id, limits=limits or GossipLimits())
        self._cipher = NO_CIPHER if secret is None else SecretCipher(secret, run_id=run_id)
        self._run_name = self._cipher.wire_name(run_id)
        self._subscriptions = Subscriptions(range(num_shards), on_message=self._on_message)
        self._membership = Membership(
            settings,
            run_id=self._run_name,
            peer_id=self.peer_id,
            rng=random.Random(),
            num_shards=num_shards,
            guard=self.guard,
        )
        handlers = {protocol(self._run_name, service): handler for service, handler in self._services.handlers.items()}
        parts = SessionParts(
            settings=settings,
            identity=identity,
            limits=self._limits,
            counters=self.counters,
            handlers=handlers,
            admission=self._admission,
            cipher=self._cipher,
            guard=self.guard,
            on_duplicate_identity=lambda: self.note_duplicate_identity(for_s=SEEN_TTLS * settings.member_ttl_s),
        )
        self._supervisor = P2pdSupervisor(parts, self._work, on_end=self._queue.close)

    @property
    def _session(self) -> Session | None:
        return self._supervisor.session

    @property
    def addresses(self) -> list[str]:
        return list(self._membership.addresses)

    @property
    def state(self) -> SwarmState:
        state = self._supervisor.down_state() if self._session is None else self._membership.state()
        if state.state is SwarmPhase.STANDALONE and self._cipher is not NO_CIPHER:
            state = replace(state, reason=f"{state.reason}; {SECRET_HINT}")
        return self._with_duplicate_identity(state)

    @property
    def clock_skew_s(self) -> float | None:
        return None if self._session is None else self._session.directory.clock_skew_s

    @property
    def process_id(self) -> int | None:
        return None if self._session is None else self._session.process.pid

    async def start(self) -> None:
        await self._supervisor.start()

    async def close(self) -> None:
        await self._supervisor.close()

    async def announce(self, payload: bytes, *, shard: int = 0) -> bool:
        self._check_announcement(payload)
        if self._session is not None:
            with suppress(OSError, EOFError):  # p2pd is going down
                name = topic(self._run_name, shard)
                ciphertext = self._cipher.encrypt(payload, "announcement", self.peer_id, name)
                await self._session.client.publish(name, ciphertext)
                self.counters.announcements_sent += 1
                return True
        return False

    async def read_shards(self, shards: Collection[int]) -> None:
        self._membership.read_shards = frozenset(shards)
        await self._subscriptions.choose(shards)

    async def publish_record(self, value: bytes, *, ttl_s: float) -> bool:
        self._check_record(value, ttl_s=ttl_s)
        if self._session is not None:
            with suppress(TimeoutError):
                return await self._session.directory.publish_record(self._run_name, value, ttl_s=ttl_s)
        return False

    async def publish_manifest(self, canonical: bytes, *, ttl_s: float) -> bool:
        if self._session is not None and self._run_name == self._run_id:
            with suppress(TimeoutError):
                return await self._session.directory.publish_manifest(self._run_id, canonical, ttl_s=ttl_s)
        return False

    async def get_record(self, peer_id: str) -> bytes | None:
        if self._session is not None:
            with suppress(TimeoutError):
                return await self._session.directory.get_record(self._run_name, peer_id)
        return None

    async def connected_peers(self) -> list[PeerConnection]:
        if self._session is not None:
            with suppress(OSError, EOFError):  # p2pd is going down
                return await self._session.client.connected_peers()
        return []

    async def members(self) -> list[str]:
        return [] if self._session is None else self._membership.members

    def look_again(self) -> None:
        self._membership.look_again()

    async def known_members(self) -> list[str]:
        return self._membership.known_members()

    async def shard_members(self) -> list[str]:
        return self._membership.shard_members

    async def _pull(
        self, peer_id: str, service: RpcService, request: bytes, *, items: ItemCollector, timeout_s: float
    ) -> Fetched:
        if self._session is None:
            return items.end(FetchOutcome.UNREACHABLE)
        return await self._session.pull(
            peer_id,
            protocol(self._run_name, service),
            request,
            items=items,
            idle_s=self._limits.idle_timeout_s,
            timeout_s=timeout_s,
        )

    async def _work(self, session: Session, on_ready: Callable[[], None]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(
                self._subscriptions.follow(lambda shard: session.client.subscribe(topic(self._run_name, shard))),
                name="gossip-topics",
            )
            await self._subscriptions.settled()
            await self._membership.poll(session)
            on_ready()
            group.create_task(self._membership.keep(session), name="gossip-membership")

    def _on_message(self, shard: int, message: GossipMessage) -> None:
        if message.sender == self.peer_id:
            return
        with self.guard.work_for(message.sender, Place.MESSAGE):
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
