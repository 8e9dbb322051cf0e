"""What both twins make of one bounded pull: fetch, ask and confirm, checked and counted alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ftis_node.gossip.encryption import MAX_OVERHEAD_BYTES
from ftis_node.gossip.interface import Fetched, FetchOutcome, GossipCounters
from ftis_node.gossip.rpc.admission import AdmissionControl
from ftis_node.gossip.rpc.bounds import ItemCollector, pack_ids
from ftis_node.gossip.rpc.services import Services
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
    """The part of `base.Gossip` in which one peer asks another. The transport is the subclass's `_pull`."""

    def __init__(self, *, peer_id: str, run_id: str, limits: GossipLimits) -> None:
        """Raises ValueError for a run id that cannot be part of a name."""
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
        """Keeps what one peer breaks that peer's affair."""
        return self._guard

    @property
    def peer_id(self) -> str:
        """This node's peer id."""
        return self._peer_id

    @property
    def counters(self) -> GossipCounters:
        """Counts since the start."""
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
        """Says where bodies and their texts come from, and who takes what peers say; see `base.Gossip.serve`."""
        self._services.use(lookup, on_confirm=on_confirm, answer=answer, lookup_text=lookup_text, on_sent=on_sent)
        self._on_refusal = on_refusal
        if is_refused is not None:
            self._admission.is_refused = is_refused

    def serve_weights(self, give: ServeWeights) -> None:
        """Says where answers to questions about weights come from."""
        self._services.use_weights(give)

    async def fetch(
        self, peer_id: str, ids: Sequence[bytes], *, as_text: bool = False, timeout_s: float | None = None
    ) -> Fetched:
        """Bodies of `ids` from a peer; see `base.Gossip.fetch`."""
        service = RpcService.FETCH_TEXT if as_text else RpcService.FETCH
        request = pack_ids(ids, limits=self._limits)
        items = ItemCollector(
            max_items=len(ids), max_item_bytes=self._limits.max_body_bytes, max_bytes=self._limits.max_request_bytes
        )
        fetched = await self._counted_pull(peer_id, service, request, items=items, timeout_s=timeout_s)
        self._counters.bodies_in += len(fetched.bodies)
        self._counters.body_bytes_in += sum(map(len, fetched.bodies))
        return fetched

    async def ask(self, peer_id: str, question: bytes, *, timeout_s: float | None = None) -> Fetched:
        """A peer's answers to a question; see `base.Gossip.ask`."""
        max_bytes = self._limits.max_announcement_bytes
        if len(question) > max_bytes:
            raise ValueError(f"a question of {len(question)} bytes; {max_bytes} are allowed")
        max_items = self._limits.max_answers
        items = ItemCollector(max_items=max_items, max_item_bytes=max_bytes, max_bytes=max_items * max_bytes)
        return await self._counted_pull(peer_id, RpcService.ASK, question, items=items, timeout_s=timeout_s)

    async def ask_weights(
        self, peer_id: str, question: bytes, *, max_items: int, timeout_s: float | None = None
    ) -> Fetched:
        """A peer's items in answer to a question about weights; see `base.Gossip.ask_weights`."""
        max_item_bytes = self._limits.max_weights_item_bytes
        items = ItemCollector(max_items=max_items, max_item_bytes=max_item_bytes, max_bytes=max_items * max_item_bytes)
        fetched = await self._counted_pull(peer_id, RpcService.WEIGHTS, question, items=items, timeout_s=timeout_s)
        self._counters.weights_bytes_in += sum(map(len, fetched.bodies))
        return fetched

    async def confirm(self, peer_id: str, ids: Sequence[bytes]) -> bool:
        """Tells a peer that its bodies were fetched and checked; whether it heard."""
        request = pack_ids(ids, limits=self._limits)
        items = ItemCollector(max_items=1, max_item_bytes=0, max_bytes=0)  # one empty item
        timeout_s = self._limits.idle_timeout_s
        told = await self._counted_pull(peer_id, RpcService.CONFIRM, request, items=items, timeout_s=timeout_s)
        has_heard = told.outcome is FetchOutcome.COMPLETE and len(told.bodies) == 1
        self._counters.confirmed_out += len(ids) if has_heard else 0
        return has_heard

    def _refuse_announcement(self, peer_id: str, error: RecordError) -> None:
        """Counts an announcement that is not delivered; for one that is too large `on_refusal` is called."""
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
        """Carries a request to a peer and its items into `pull`. Raises nothing for what a peer does."""
