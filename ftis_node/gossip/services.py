"""Services for peers, and requests to peers: bodies, confirmations, queries, weights.

A service takes a request and yields items. The requests of `interface.Gossip` here are the same over libp2p and in
memory: limits, counters, fault handling.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import aclosing
from typing import TYPE_CHECKING

from ftis_node.errors import RecordError
from ftis_node.gossip.encryption import MAX_OVERHEAD_BYTES
from ftis_node.gossip.interface import Fetched, FetchOutcome, GossipCounters
from ftis_node.gossip.wire_format import ItemCollector, RpcService, check_run_id, pack_ids, read_bodies, unpack_ids
from ftis_node.swarm.peer_guard import PeerGuard, Place
from ftis_node.swarm.rate_limits import UploadBudget

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from ftis_node.gossip.interface import (
        AnswerQuery,
        GossipLimits,
        IsRefused,
        Lookup,
        OnConfirm,
        OnRefusal,
        OnSent,
        ServeWeights,
    )

    Handler = Callable[[str, bytes], AsyncGenerator[bytes, None]]

# In units of usual requests. Honest peers send these rarely, and a query costs several look-ups.
COSTS = {RpcService.HELLO: 10.0, RpcService.BATCHES: 10.0, RpcService.ASK: 10.0}
PLACES = {RpcService.ASK: Place.CATCH_UP, RpcService.CONFIRM: Place.CONFIRM, RpcService.WEIGHTS: Place.WEIGHTS}


class OverBudget(RecordError):
    """A request exceeds a limit; `reason` names the limit."""


class StreamSlots:
    """Counters of concurrent streams, in total and for each peer."""

    def __init__(self, *, max_total: int, max_per_peer: int) -> None:
        self._max_total = max_total
        self._max_per_peer = max_per_peer
        self._taken: Counter[str] = Counter()

    def take(self, peer_id: str) -> bool:
        """Take a slot for a peer; return whether one was free."""
        if self._taken.total() >= self._max_total or self._taken[peer_id] >= self._max_per_peer:
            return False
        self._taken[peer_id] += 1
        return True

    def give_back(self, peer_id: str) -> None:
        self._taken[peer_id] -= 1
        if not self._taken[peer_id]:
            del self._taken[peer_id]


class AdmissionControl:
    """Admission control shared by all streams of a node. Outlives p2pd sessions, so a restart resets no budget."""

    def __init__(self, limits: GossipLimits) -> None:
        self._slots = StreamSlots(max_total=limits.max_streams, max_per_peer=limits.max_streams_per_peer)
        self._budget = UploadBudget(
            max_bytes_per_s=limits.max_upload_bytes_per_s, max_requests_per_minute=limits.max_requests_per_minute
        )
        self.is_refused: Callable[[str], bool] = _admit_all

    def enter(self, peer_id: str, service: RpcService) -> None:
        """Take a slot, which `leave` gives back. Raises OverBudget if the peer must retry later."""
        if not self._budget.takes_request(peer_id, service, cost=COSTS.get(service, 1.0), now=_now()):
            raise OverBudget("over_requests", f"too many requests from {peer_id} for {service}")
        if not self._slots.take(peer_id):
            raise OverBudget("busy", "all stream slots are taken")

    def leave(self, peer_id: str) -> None:
        self._slots.give_back(peer_id)

    async def before_item(self, peer_id: str, num_bytes: int) -> None:
        """Wait until an item may be sent. Raises OverBudget if that would take long."""
        wait_s = self._budget.wait_s(peer_id, num_bytes, now=_now())
        if wait_s is None:
            raise OverBudget("over_bytes", f"upload budget exceeded by {num_bytes} bytes for {peer_id}")
        if wait_s > 0:
            await asyncio.sleep(wait_s)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _admit_all(peer_id: str) -> bool:
    return False


class Services:
    """Request handlers by service. Until `use` is called this node serves no bodies."""

    def __init__(self, *, limits: GossipLimits, counters: GossipCounters) -> None:
        self._limits = limits
        self._counters = counters
        self._lookup: Lookup = _find_none
        self._lookup_text: Lookup = _find_none
        self._on_confirm: OnConfirm | None = None
        self._on_sent: OnSent | None = None
        self._answer: AnswerQuery | None = None
        self._give_weights: ServeWeights | None = None

    @property
    def handlers(self) -> dict[RpcService, Handler]:
        """Return the handler of each service. A handler takes a peer id and a request, and yields items."""
        return {
            RpcService.HELLO: self._hello,
            RpcService.BATCHES: self._hello,
            RpcService.FETCH: self._bodies,
            RpcService.FETCH_TEXT: self._texts,
            RpcService.CONFIRM: self._confirmation,
            RpcService.ASK: self._answers,
            RpcService.WEIGHTS: self._weights,
        }

    def use(
        self,
        lookup: Lookup,
        *,
        on_confirm: OnConfirm | None,
        answer: AnswerQuery | None,
        lookup_text: Lookup | None,
        on_sent: OnSent | None = None,
    ) -> None:
        """Set the callbacks."""
        self._lookup, self._on_confirm, self._answer = lookup, on_confirm, answer
        self._lookup_text = lookup_text or _find_none
        self._on_sent = on_sent

    def use_weights(self, give: ServeWeights) -> None:
        self._give_weights = give

    async def _hello(self, peer_id: str, request: bytes) -> AsyncGenerator[bytes, None]:
        """Yield one empty item."""
        yield b""

    def _bodies(self, peer_id: str, request: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the available bodies of the ids in `request`. Raises RecordError for an invalid request."""
        return self._looked_up(peer_id, self._lookup, request)

    def _texts(self, peer_id: str, request: bytes) -> AsyncGenerator[bytes, None]:
        """Yield this node's own bodies in `request`, re-encoded as text. Raises RecordError for an invalid request."""
        return self._looked_up(peer_id, self._lookup_text, request)

    async def _looked_up(self, peer_id: str, lookup: Lookup, request: bytes) -> AsyncGenerator[bytes, None]:
        def on_taken(body_id: bytes) -> None:
            if self._on_sent is not None:
                self._on_sent(peer_id, body_id)

        ids = unpack_ids(request, limits=self._limits)
        async for body in read_bodies(lookup, ids, limits=self._limits, on_taken=on_taken):
            yield body
            self._counters.bodies_out += 1
            self._counters.body_bytes_out += len(body)

    async def _confirmation(self, peer_id: str, request: bytes) -> AsyncGenerator[bytes, None]:
        """Pass on confirmed ids; yield one empty item. Raises RecordError for an invalid request."""
        ids = unpack_ids(request, limits=self._limits)
        self._counters.confirmed_in += len(ids)
        if self._on_confirm is not None:
            await self._on_confirm(peer_id, ids)
        yield b""

    async def _answers(self, peer_id: str, request: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the answers to the query in `request`."""
        for answer in await self._answer(peer_id, request) if self._answer is not None else ():
            yield answer

    async def _weights(self, peer_id: str, request: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the requested items of weights. Raises RecordError for an invalid request."""
        if self._give_weights is None:
            return
        async with aclosing(self._give_weights(peer_id, request)) as items:
            async for item in items:
                yield item
                self._counters.weights_bytes_out += len(item)


async def _find_none(ids: Sequence[bytes]) -> Sequence[bytes]:
    return ()


class PeerCalls(ABC):
    """Base class of both implementations of `interface.Gossip`; subclasses implement the transport in `_pull`."""

    def __init__(self, *, peer_id: str, run_id: str, limits: GossipLimits) -> None:
        """Raises ValueError for an invalid run id."""
        self._peer_id = peer_id
        self._run_id = check_run_id(run_id)
        self._limits = limits
        self._counters = GossipCounters()
        self._services = Services(limits=limits, counters=self._counters)
        self._admission = AdmissionControl(limits)
        self._on_refusal: OnRefusal | None = None
        self._guard = PeerGuard()

    @property
    def guard(self) -> PeerGuard:
        return self._guard

    @property
    def peer_id(self) -> str:
        return self._peer_id

    @property
    def counters(self) -> GossipCounters:
        return self._counters

    def serve(
        self,
        lookup: Lookup,
        *,
        on_confirm: OnConfirm | None = None,
        answer: AnswerQuery | None = None,
        lookup_text: Lookup | None = None,
        is_refused: IsRefused | None = None,
        on_sent: OnSent | None = None,
        on_refusal: OnRefusal | None = None,
    ) -> None:
        """See `interface.Gossip.serve`."""
        self._services.use(lookup, on_confirm=on_confirm, answer=answer, lookup_text=lookup_text, on_sent=on_sent)
        self._on_refusal = on_refusal
        if is_refused is not None:
            self._admission.is_refused = is_refused

    def serve_weights(self, give: ServeWeights) -> None:
        """See `interface.Gossip.serve_weights`."""
        self._services.use_weights(give)

    async def fetch(
        self, peer_id: str, ids: Sequence[bytes], *, as_text: bool = False, timeout_s: float | None = None
    ) -> Fetched:
        """See `interface.Gossip.fetch`."""
        service = RpcService.FETCH_TEXT if as_text else RpcService.FETCH
        request = pack_ids(ids, limits=self._limits)
        items = ItemCollector(
            max_items=len(ids), max_item_bytes=self._limits.max_body_bytes, max_bytes=self._limits.max_request_bytes
        )
        fetched = await self._counted_pull(peer_id, service, request, items=items, timeout_s=timeout_s)
        self._counters.bodies_in += len(fetched.bodies)
        self._counters.body_bytes_in += sum(map(len, fetched.bodies))
        return fetched

    async def request_backfill(self, peer_id: str, question: bytes, *, timeout_s: float | None = None) -> Fetched:
        """See `interface.Gossip.request_backfill`."""
        max_bytes = self._limits.max_announcement_bytes
        if len(question) > max_bytes:
            raise ValueError(f"a query of {len(question)} bytes; {max_bytes} are allowed")
        max_items = self._limits.max_answers
        items = ItemCollector(max_items=max_items, max_item_bytes=max_bytes, max_bytes=max_items * max_bytes)
        return await self._counted_pull(peer_id, RpcService.ASK, question, items=items, timeout_s=timeout_s)

    async def request_weights(
        self, peer_id: str, question: bytes, *, max_items: int, timeout_s: float | None = None
    ) -> Fetched:
        """See `interface.Gossip.request_weights`."""
        max_item_bytes = self._limits.max_weights_item_bytes
        items = ItemCollector(max_items=max_items, max_item_bytes=max_item_bytes, max_bytes=max_items * max_item_bytes)
        fetched = await self._counted_pull(peer_id, RpcService.WEIGHTS, question, items=items, timeout_s=timeout_s)
        self._counters.weights_bytes_in += sum(map(len, fetched.bodies))
        return fetched

    async def confirm(self, peer_id: str, ids: Sequence[bytes]) -> bool:
        """See `interface.Gossip.confirm`."""
        request = pack_ids(ids, limits=self._limits)
        items = ItemCollector(max_items=1, max_item_bytes=0, max_bytes=0)  # one empty item
        timeout_s = self._limits.idle_timeout_s
        response = await self._counted_pull(peer_id, RpcService.CONFIRM, request, items=items, timeout_s=timeout_s)
        is_acknowledged = response.outcome is FetchOutcome.COMPLETE and len(response.bodies) == 1
        self._counters.confirmed_out += len(ids) if is_acknowledged else 0
        return is_acknowledged

    def _refuse_announcement(self, peer_id: str, error: RecordError) -> None:
        """Count a rejected announcement; call `on_refusal` if it was too large."""
        self._counters.announcements_refused += 1
        if self._on_refusal is not None and error.reason == "size":
            self._on_refusal(peer_id, error)

    def _check_announcement(self, payload: bytes) -> None:
        if len(payload) > self._limits.max_announcement_bytes:
            raise ValueError(f"{len(payload)} bytes; {self._limits.max_announcement_bytes} are allowed")

    def _check_record(self, value: bytes, *, ttl_s: float) -> None:
        max_bytes, max_ttl_s = self._limits.max_record_bytes - MAX_OVERHEAD_BYTES, self._limits.max_record_ttl_s
        if len(value) > max_bytes or not 0 < ttl_s <= max_ttl_s:
            raise ValueError(f"{len(value)} bytes for {ttl_s} s; {max_bytes} bytes for {max_ttl_s} s are allowed")

    async def _counted_pull(
        self, peer_id: str, service: RpcService, request: bytes, *, items: ItemCollector, timeout_s: float | None
    ) -> Fetched:
        total_s = self._limits.fetch_timeout_s if timeout_s is None else timeout_s
        fetched = items.end(FetchOutcome.BROKEN)
        with self._guard.work_for(peer_id, PLACES.get(service, Place.PULL)):
            fetched = await self._pull(peer_id, service, request, items=items, timeout_s=total_s)
        if fetched.outcome is not FetchOutcome.COMPLETE:
            self._counters.count_fetch_error(fetched.outcome)
        return fetched

    @abstractmethod
    async def _pull(
        self, peer_id: str, service: RpcService, request: bytes, *, items: ItemCollector, timeout_s: float
    ) -> Fetched:
        """Send a request to a peer and add its items to `items`. Raises no exception for a peer's behavior."""
