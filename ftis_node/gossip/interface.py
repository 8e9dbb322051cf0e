"""The interface between the daemon and the network: messages, envelopes, confirmations, the directory, the members.

This package transports bytes: the caller validates the contents, this package enforces sender, size and time limits.
An id is the 32-byte hash of an envelope's body. Calls raise no exception if a peer does not answer or sends invalid
data. A fetch returns its outcome, and counters record it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace

from ftis_node.errors import RecordError
from ftis_node.gossip.encryption import MAX_OVERHEAD_BYTES
from ftis_node.gossip.frames import ItemCollector
from ftis_node.gossip.multiaddr import Reachability, reachability_of
from ftis_node.gossip.names import RpcService
from ftis_node.gossip.pubsub import AnnouncementQueue
from ftis_node.gossip.services import AdmissionControl, Services
from ftis_node.gossip.types import (
    DUPLICATE_IDENTITY,
    AnswerQuery,
    Fetched,
    FetchOutcome,
    GossipCounters,
    GossipLimits,
    GossipMessage,
    Lookup,
    OnConfirm,
    OnRefusal,
    OnSent,
    PeerConnection,
    PeerTest,
    ServeWeights,
    SwarmState,
)
from ftis_node.swarm.peer_guard import PeerGuard, Place

logger = logging.getLogger(__name__)

PLACES = {RpcService.ASK: Place.CATCH_UP, RpcService.CONFIRM: Place.CONFIRM, RpcService.WEIGHTS: Place.WEIGHTS}


class Gossip(ABC):
    """One node's connection to the swarm of one run. Call `serve` before `start`; nothing works after `close`.

    `peer_id` is this node's (`12D3Koo...`). `guard` is the exception barrier for work for peers; the node sets its
    `on_fault` before `start`.
    """

    def __init__(self, *, peer_id: str, run_id: str, limits: GossipLimits) -> None:
        self.peer_id = peer_id
        self.counters = GossipCounters()
        self.guard = PeerGuard()
        self._run_id = run_id
        self._limits = limits
        self._services = Services(limits=limits, counters=self.counters)
        self._admission = AdmissionControl(limits)
        self._on_refusal: OnRefusal | None = None
        self._queue = AnnouncementQueue(capacity=limits.max_queued_announcements, counters=self.counters)
        self._duplicate_until: float | None = None  # by the loop's clock; None before another node was noticed

    @property
    @abstractmethod
    def addresses(self) -> list[str]:
        """Return the multiaddrs with `/p2p/ID` at which peers can dial this node; empty before the start."""

    @property
    @abstractmethod
    def state(self) -> SwarmState:
        """Return the current state of the connection to the swarm."""

    @property
    @abstractmethod
    def clock_skew_s(self) -> float | None:
        """Return the clock offset to peers in seconds (peer minus local); None before the first measurement."""

    @property
    def reachability(self) -> Reachability:
        return reachability_of(self.addresses)

    def serve(
        self,
        lookup: Lookup,
        *,
        on_confirm: OnConfirm | None = None,
        answer: AnswerQuery | None = None,
        lookup_text: Lookup | None = None,
        is_refused: PeerTest | None = None,
        is_new: PeerTest | None = None,
        on_sent: OnSent | None = None,
        on_refusal: OnRefusal | None = None,
    ) -> None:
        """Set the look-ups of envelopes, and the callbacks for confirmations and queries.

        `lookup_text` returns, for ids of this node's own groups, the same groups re-encoded as text. Streams of peers
        for which `is_refused` is true are closed before they are read. All peers for which `is_new` is true together
        get three quarters of the streams. `on_sent` is called for each envelope sent
        completely, `on_refusal` for each announcement that was too large.
        """
        services = self._services
        services.lookup, services.on_confirm, services.answer, services.on_sent = lookup, on_confirm, answer, on_sent
        if lookup_text is not None:
            services.lookup_text = lookup_text
        self._on_refusal = on_refusal
        if is_refused is not None:
            self._admission.is_refused = is_refused
        if is_new is not None:
            self._admission.is_new = is_new

    def serve_weights(self, give: ServeWeights) -> None:
        """Set the handler for requests about weights, at any time. Before that such requests get no items."""
        self._services.give_weights = give

    @abstractmethod
    async def start(self) -> None:
        """Join the swarm. Return once this node can be dialed, whether or not a peer is connected.

        Raises UsageError if the listen address is taken, MachineError if the network process does not start.
        """

    @abstractmethod
    async def close(self) -> None:
        """Leave the swarm; end all child processes and remove temporary files."""

    @abstractmethod
    def look_again(self) -> None:
        """Renew this node's entry among the members, and look for members, without waiting for the next round."""

    @abstractmethod
    async def announce(self, payload: bytes, *, shard: int = 0) -> bool:
        """Publish a message to the members that read a shard; return False if the network process is down.

        Raises ValueError for a payload above `max_announcement_bytes`.
        """

    @abstractmethod
    async def read_shards(self, shards: Collection[int]) -> None:
        """Read exactly these shards from now on. Subscribe to new ones before leaving old ones."""

    def note_duplicate_identity(self, *, for_s: float = math.inf) -> None:
        """Name another node under this node's identity in the state for the next `for_s` seconds."""
        if self._duplicate_until is None:
            logger.warning("%s (peer id %s)", DUPLICATE_IDENTITY, self.peer_id)
        self._duplicate_until = asyncio.get_running_loop().time() + for_s

    def _with_duplicate_identity(self, state: SwarmState) -> SwarmState:
        if self._duplicate_until is None or asyncio.get_running_loop().time() >= self._duplicate_until:
            return state
        return replace(state, reason=f"{state.reason}; {DUPLICATE_IDENTITY}")

    def announcements(self) -> AsyncIterator[GossipMessage]:
        """Iterate over messages of other nodes in order of arrival, until closed. One reader at a time.

        Raises the internal error that ended the network, if one did.
        """
        return self._queue.drain()

    async def fetch(
        self, peer_id: str, ids: Sequence[bytes], *, as_text: bool = False, timeout_s: float | None = None
    ) -> Fetched:
        """Fetch the envelopes of `ids` (1 to `max_ids_per_request`).

        `as_text` requests the text form, which only the creator has; other peers are UNREACHABLE for that service.
        """
        service = RpcService.FETCH_TEXT if as_text else RpcService.FETCH
        request = b"".join(ids)
        items = ItemCollector(
            max_items=len(ids), max_item_bytes=self._limits.max_envelope_bytes, max_bytes=self._limits.max_request_bytes
        )
        fetched = await self._counted_pull(peer_id, service, request, items=items, timeout_s=timeout_s)
        self.counters.envelopes_in += len(fetched.items)
        self.counters.envelope_bytes_in += sum(map(len, fetched.items))
        return fetched

    async def request_backfill(self, peer_id: str, question: bytes, *, timeout_s: float | None = None) -> Fetched:
        """Send a query for a peer's groups (at most `max_announcement_bytes`); return its answers."""
        max_bytes = self._limits.max_announcement_bytes
        if len(question) > max_bytes:
            raise ValueError(f"a query of {len(question)} bytes; {max_bytes} are allowed")
        max_items = self._limits.max_answers
        items = ItemCollector(max_items=max_items, max_item_bytes=max_bytes, max_bytes=max_items * max_bytes)
        return await self._counted_pull(peer_id, RpcService.ASK, question, items=items, timeout_s=timeout_s)

    async def request_weights(
        self, peer_id: str, question: bytes, *, max_items: int, timeout_s: float | None = None
    ) -> Fetched:
        """Send a query about weights; return at most `max_items` items."""
        max_item_bytes = self._limits.max_weights_item_bytes
        items = ItemCollector(max_items=max_items, max_item_bytes=max_item_bytes, max_bytes=max_items * max_item_bytes)
        fetched = await self._counted_pull(peer_id, RpcService.WEIGHTS, question, items=items, timeout_s=timeout_s)
        self.counters.weights_bytes_in += sum(map(len, fetched.items))
        return fetched

    async def confirm(self, peer_id: str, ids: Sequence[bytes]) -> bool:
        """Confirm to a peer that its groups were fetched and validated; return whether it received the confirmation."""
        request = b"".join(ids)
        items = ItemCollector(max_items=1, max_item_bytes=0, max_bytes=0)  # one empty item
        timeout_s = self._limits.idle_timeout_s
        response = await self._counted_pull(peer_id, RpcService.CONFIRM, request, items=items, timeout_s=timeout_s)
        is_acknowledged = response.outcome is FetchOutcome.COMPLETE and len(response.items) == 1
        self.counters.confirmed_out += len(ids) if is_acknowledged else 0
        return is_acknowledged

    @abstractmethod
    async def publish_record(self, value: bytes, *, ttl_s: float) -> bool:
        """Store this node's record in the directory; return the success. Raises ValueError above the limits."""

    @abstractmethod
    async def publish_manifest(self, canonical: bytes, *, ttl_s: float) -> bool:
        """Store the run's manifest in the directory under the run id, its hash; return whether it was accepted.

        Nothing is stored for a run with a secret, because its manifest is private.
        """

    @abstractmethod
    async def get_record(self, peer_id: str) -> bytes | None:
        """Return a peer's record in this run's directory; None if there is none or the directory does not answer."""

    @abstractmethod
    async def connected_peers(self) -> list[PeerConnection]:
        """Return all connected peers: members, bootstrap nodes, relays, others."""

    @abstractmethod
    async def members(self) -> list[str]:
        """Return the peer ids of connected members of this run."""

    @abstractmethod
    async def known_members(self) -> list[str]:
        """Return members that are connected or were recently listed: all of a small run, many of a large one."""

    @abstractmethod
    async def shard_members(self) -> list[str]:
        """Return the other members of this node's own shard that are connected or listed in the directory."""

    @abstractmethod
    async def _pull(
        self, peer_id: str, service: RpcService, request: bytes, *, items: ItemCollector, timeout_s: float
    ) -> Fetched:
        """Send a request to a peer and add its items to `items`. Raises no exception for a peer's behavior."""

    async def _counted_pull(
        self, peer_id: str, service: RpcService, request: bytes, *, items: ItemCollector, timeout_s: float | None
    ) -> Fetched:
        total_s = self._limits.fetch_timeout_s if timeout_s is None else timeout_s
        fetched = items.end(FetchOutcome.BROKEN)
        with self.guard.work_for(peer_id, PLACES.get(service, Place.PULL)):
            fetched = await self._pull(peer_id, service, request, items=items, timeout_s=total_s)
        if fetched.outcome is not FetchOutcome.COMPLETE:
            self.counters.fetch_errors[fetched.outcome.value] += 1
        return fetched

    def _refuse_announcement(self, peer_id: str, error: RecordError) -> None:
        self.counters.announcements_refused += 1
        if self._on_refusal is not None and error.reason == "size":
            self._on_refusal(peer_id, error)

    def _check_announcement(self, payload: bytes) -> None:
        if len(payload) > self._limits.max_announcement_bytes:
            raise ValueError(f"{len(payload)} bytes; {self._limits.max_announcement_bytes} are allowed")

    def _check_record(self, value: bytes, *, ttl_s: float) -> None:
        max_bytes, max_ttl_s = self._limits.max_record_bytes - MAX_OVERHEAD_BYTES, self._limits.max_record_ttl_s
        if len(value) > max_bytes or not 0 < ttl_s <= max_ttl_s:
            raise ValueError(f"{len(value)} bytes for {ttl_s} s; {max_bytes} bytes for {max_ttl_s} s are allowed")
