"""Requests of `interface.Gossip` that are the same over libp2p and in memory: limits, counters, fault handling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ftis_node.gossip.encryption import MAX_OVERHEAD_BYTES
from ftis_node.gossip.interface import Fetched, FetchOutcome, GossipCounters
from ftis_node.gossip.rpc.frames import ItemCollector, pack_ids
from ftis_node.gossip.rpc.services import AdmissionControl, Services
from ftis_node.gossip.wire_names import RpcService, check_run_id
from ftis_node.swarm.peer_guard import PeerGuard, Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.errors import RecordError
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

PLACES = {RpcService.ASK: Place.CATCH_UP, RpcService.CONFIRM: Place.CONFIRM, RpcService.WEIGHTS: Place.WEIGHTS}


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
