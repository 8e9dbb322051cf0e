"""The swarm within one process: the same protocol and limits, no sockets. For tests and experiments.

Every message arrives immediately and in order, but for the announcements and requests for which a hook,
`loses(sender, receiver, payload)`, returns true.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing

from ftis_node.errors import RecordError
from ftis_node.gossip.frames import ItemCollector, outcome_of
from ftis_node.gossip.interface import Gossip
from ftis_node.gossip.names import RpcService
from ftis_node.gossip.services import OverBudget
from ftis_node.gossip.types import (
    ConnectionFacts,
    Fetched,
    FetchOutcome,
    GossipLimits,
    GossipMessage,
    PeerConnection,
    SwarmPhase,
    SwarmState,
)
from ftis_node.swarm.peer_guard import Place, is_own
from ftis_node.swarm.topology import shard_of

LossHook = Callable[[str, str, bytes], bool]
Frame = bytes | FetchOutcome


logger = logging.getLogger(__name__)

UNBOUNDED = 1e15


class LoopbackSwarm:
    """Any number of nodes of any runs, in one event loop."""

    def __init__(self, *, loses: LossHook | None = None) -> None:
        self.loses: LossHook = loses or (lambda sender, receiver, payload: False)
        self.nodes: dict[tuple[str, str], LoopbackGossip] = {}  # started nodes by run and peer, in order of start
        self._records: dict[tuple[str, str], tuple[bytes, float]] = {}  # value and expiry by the loop's clock

    def join(
        self, peer_id: str, *, run_id: str, limits: GossipLimits | None = None, num_shards: int = 1
    ) -> LoopbackGossip:
        """Return a node that is not started yet. It reads all of the run's shards until `read_shards` is called.

        Without `limits` it serves without budgets, because an experiment does not run in real time.
        """
        limits = limits or GossipLimits(max_requests_per_minute=UNBOUNDED, max_upload_bytes_per_s=UNBOUNDED)
        return LoopbackGossip(self, peer_id=peer_id, run_id=run_id, limits=limits, num_shards=num_shards)

    def put_record(self, peer_id: str, value: bytes, *, run_id: str, ttl_s: float) -> None:
        self._records[run_id, peer_id] = (value, asyncio.get_running_loop().time() + ttl_s)

    def get_record(self, peer_id: str, *, run_id: str) -> bytes | None:
        value, expires_at = self._records.get((run_id, peer_id), (None, 0.0))
        return value if asyncio.get_running_loop().time() < expires_at else None


class LoopbackGossip(Gossip):
    """Implementation of `Gossip` in memory. `LoopbackSwarm.join` creates it."""

    def __init__(
        self, swarm: LoopbackSwarm, *, peer_id: str, run_id: str, limits: GossipLimits, num_shards: int
    ) -> None:
        super().__init__(peer_id=peer_id, run_id=run_id, limits=limits)
        self._swarm = swarm
        self._num_shards = num_shards
        self._shards = frozenset(range(num_shards))
        self._is_up = False

    @property
    def clock_skew_s(self) -> float:
        return 0.0

    @property
    def addresses(self) -> list[str]:
        return [f"/memory/loopback/p2p/{self.peer_id}"] if self._is_up else []

    @property
    def state(self) -> SwarmState:
        if not self._is_up:
            return SwarmState(SwarmPhase.STARTING, "not started")
        num_members = len(self._others())
        facts = ConnectionFacts(num_members=num_members, num_connected=num_members, has_looked=True)
        state = facts.describe(next_try_in_s=0)
        return self._with_duplicate_identity(state)

    async def start(self) -> None:
        self._is_up = True
        nodes, key = self._swarm.nodes, (self._run_id, self.peer_id)
        if (other := nodes.get(key, self)) is not self:
            other.note_duplicate_identity()
            self.note_duplicate_identity()
        nodes[key] = self

    async def close(self) -> None:
        self._is_up = False
        if self._swarm.nodes.get((self._run_id, self.peer_id)) is self:
            del self._swarm.nodes[self._run_id, self.peer_id]
        self._queue.close()

    def look_again(self) -> None:
        """Do nothing: there is no entry to renew."""

    async def announce(self, payload: bytes, *, shard: int = 0) -> bool:
        self._check_announcement(payload)
        if not self._is_up:
            return False
        self.counters.announcements_sent += 1
        for other in self._others():
            if not self._swarm.loses(self.peer_id, other.peer_id, payload):
                other.deliver(GossipMessage(self.peer_id, payload, shard))
        return True

    async def read_shards(self, shards: Collection[int]) -> None:
        self._shards = frozenset(shards)

    def deliver(self, announcement: GossipMessage) -> None:
        if not self._is_up or announcement.shard not in self._shards:
            return
        if len(announcement.payload) > self._limits.max_announcement_bytes:
            error = RecordError("size", f"an announcement of {len(announcement.payload)} bytes")
            self._refuse_announcement(announcement.sender, error)
            return
        self._queue.put(announcement)

    async def publish_record(self, value: bytes, *, ttl_s: float) -> bool:
        self._check_record(value, ttl_s=ttl_s)
        if self._is_up:
            self._swarm.put_record(self.peer_id, value, run_id=self._run_id, ttl_s=ttl_s)
        return self._is_up

    async def publish_manifest(self, canonical: bytes, *, ttl_s: float) -> bool:
        """Do nothing, because all nodes of the process have the manifest."""
        return self._is_up

    async def get_record(self, peer_id: str) -> bytes | None:
        return self._swarm.get_record(peer_id, run_id=self._run_id) if self._is_up else None

    async def connected_peers(self) -> list[PeerConnection]:
        return [PeerConnection(other.peer_id, tuple(other.addresses)) for other in self._others()]

    async def members(self) -> list[str]:
        return [other.peer_id for other in self._others()]

    async def known_members(self) -> list[str]:
        return await self.members()

    async def shard_members(self) -> list[str]:
        own = shard_of(self.peer_id, self._num_shards)
        return [other.peer_id for other in self._others() if shard_of(other.peer_id, self._num_shards) == own]

    def _others(self) -> list[LoopbackGossip]:
        if not self._is_up:
            return []
        return [node for (run, _), node in self._swarm.nodes.items() if run == self._run_id and node is not self]

    async def _pull(
        self, peer_id: str, service: RpcService, request: bytes, *, items: ItemCollector, timeout_s: float
    ) -> Fetched:
        other = next((node for node in self._others() if node.peer_id == peer_id), None)
        if other is None or self._swarm.loses(self.peer_id, peer_id, request):
            return items.end(FetchOutcome.UNREACHABLE)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(0)
                if not other._is_up:  # closed meanwhile: nothing of a closed node runs any more
                    return items.end(FetchOutcome.UNREACHABLE)
                async with aclosing(other.serve_stream(self.peer_id, service, request)) as frames:
                    while True:
                        async with asyncio.timeout(self._limits.idle_timeout_s):
                            frame = await anext(frames)
                        if isinstance(frame, FetchOutcome):
                            return items.end(frame)
                        await asyncio.sleep(0)
                        items.add(frame)
        except TimeoutError:
            return items.end(FetchOutcome.TIMED_OUT)
        except RecordError as error:
            return items.end(outcome_of(error))

    async def serve_stream(self, peer_id: str, service: RpcService, request: bytes) -> AsyncGenerator[Frame, None]:
        """Yield items for a peer, then the outcome of the stream."""
        if self._admission.is_refused(peer_id):
            self.counters.serve_errors["refused"] += 1
            yield FetchOutcome.BROKEN
            return
        try:
            with self._admission.admitted(peer_id, service):
                async with aclosing(self._services.handlers[service](peer_id, request)) as items:
                    async for item in items:
                        await self._admission.before_item(peer_id, len(item))
                        yield item
            yield FetchOutcome.COMPLETE
        except OverBudget as error:
            self.counters.serve_errors[error.reason] += 1
            yield FetchOutcome.BUSY
        except (RecordError, OSError, EOFError) as error:
            self.counters.serve_errors[getattr(error, "reason", "broken")] += 1
            yield FetchOutcome.BROKEN
        except Exception as error:  # `work_for` would also catch errors of the reader: it would be around a `yield`
            if is_own(error):
                logger.exception("serving a request failed")
            else:
                self.guard.note(peer_id, Place.SERVE, error)
            self.counters.serve_errors["fault"] += 1
            yield FetchOutcome.BROKEN
