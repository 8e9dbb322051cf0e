"""Services for peers: envelopes, confirmations, queries, weights. A service takes a request and yields items."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager

from ftis_node.errors import RecordError
from ftis_node.gossip.frames import unpack_ids
from ftis_node.gossip.names import RpcService
from ftis_node.gossip.types import (
    AnswerQuery,
    GossipCounters,
    GossipLimits,
    Lookup,
    OnConfirm,
    OnSent,
    PeerTest,
    ServeWeights,
)
from ftis_node.swarm.rate_limits import PeerSlots, UploadBudget

Handler = Callable[[str, bytes], AsyncGenerator[bytes, None]]


# In units of usual requests. Honest peers send these rarely, and a query costs several look-ups.
COSTS = {RpcService.HELLO: 10.0, RpcService.ASK: 10.0}


class OverBudget(RecordError):
    """A request exceeds a limit; `reason` names the limit."""


class AdmissionControl:
    """Admission control shared by all streams of a node. Outlives p2pd sessions, so a restart resets no budget."""

    def __init__(self, limits: GossipLimits) -> None:
        self._limits = limits
        self._streams = PeerSlots()  # served now
        self._budget = UploadBudget(
            max_bytes_per_s=limits.max_upload_bytes_per_s, max_requests_per_minute=limits.max_requests_per_minute
        )
        self.is_refused: PeerTest = lambda peer_id: False
        self.is_new: PeerTest = lambda peer_id: False

    @contextmanager
    def admitted(self, peer_id: str, service: RpcService) -> Iterator[None]:
        """Occupy a slot inside the block. Raises OverBudget if the peer must retry later."""
        if not self._budget.takes_request(peer_id, service, cost=COSTS.get(service, 1.0), now=_now()):
            raise OverBudget("over_requests", f"too many requests from {peer_id} for {service}")
        max_streams, max_of_peer = self._limits.max_streams, self._limits.max_streams_per_peer
        kind = self.take_slot(self._streams, peer_id, most=max_streams, per_peer=max_of_peer)
        if kind is None:
            raise OverBudget("busy", "all stream slots are taken")
        try:
            yield
        finally:
            self._streams.release(peer_id, kind)

    def take_slot(self, slots: PeerSlots, peer_id: str, *, most: int, per_peer: int) -> str | None:
        """Take one of `most` slots, and return its kind; None if none is free for the peer.

        A peer can have many identities, so new peers together get three quarters of the slots.
        """
        kind, most_of_kind = ("new", max(1, most * 3 // 4)) if self.is_new(peer_id) else ("known", most)
        is_free = slots.num_held() < most and slots.take(peer_id, kind, most_of_kind, per_peer)
        return kind if is_free else None

    async def before_item(self, peer_id: str, num_bytes: int) -> None:
        """Wait until an item may be sent. Raises OverBudget if that would take long."""
        wait_s = self._budget.wait_s(peer_id, num_bytes, now=_now())
        if wait_s is None:
            raise OverBudget("over_bytes", f"upload budget exceeded by {num_bytes} bytes for {peer_id}")
        if wait_s > 0:
            await asyncio.sleep(wait_s)


def _now() -> float:
    return asyncio.get_running_loop().time()


class Services:
    """Request handlers by service. The callbacks may be set at any time."""

    def __init__(self, *, limits: GossipLimits, counters: GossipCounters) -> None:
        self._limits = limits
        self._counters = counters
        self.lookup: Lookup = _find_none
        self.lookup_text: Lookup = _find_none
        self.on_confirm: OnConfirm | None = None
        self.on_sent: OnSent | None = None
        self.answer: AnswerQuery | None = None
        self.give_weights: ServeWeights | None = None

    @property
    def handlers(self) -> dict[RpcService, Handler]:
        """Return the handler of each service. A handler takes a peer id and a request, and yields items."""
        return {
            RpcService.HELLO: self._hello,
            RpcService.FETCH: lambda peer_id, request: self._envelopes(peer_id, request, self.lookup),
            RpcService.FETCH_TEXT: lambda peer_id, request: self._envelopes(peer_id, request, self.lookup_text),
            RpcService.CONFIRM: self._confirmation,
            RpcService.ASK: self._answers,
            RpcService.WEIGHTS: self._weights,
        }

    async def _hello(self, peer_id: str, request: bytes) -> AsyncGenerator[bytes, None]:
        yield b""

    async def _envelopes(self, peer_id: str, request: bytes, lookup: Lookup) -> AsyncGenerator[bytes, None]:
        """Yield the available envelopes of the ids in `request`. Raises RecordError for an invalid request.

        One is read at a time, so that a slow peer occupies little memory.
        """
        for group_id in unpack_ids(request, limits=self._limits):
            for envelope in await lookup([group_id]):
                yield envelope
                self._counters.envelopes_out += 1
                self._counters.envelope_bytes_out += len(envelope)
                if self.on_sent is not None:
                    self.on_sent(peer_id, group_id)

    async def _confirmation(self, peer_id: str, request: bytes) -> AsyncGenerator[bytes, None]:
        ids = unpack_ids(request, limits=self._limits)
        if self.on_confirm is not None:
            await self.on_confirm(peer_id, ids)
        yield b""

    async def _answers(self, peer_id: str, request: bytes) -> AsyncGenerator[bytes, None]:
        for answer in await self.answer(peer_id, request) if self.answer is not None else ():
            yield answer

    async def _weights(self, peer_id: str, request: bytes) -> AsyncGenerator[bytes, None]:
        if self.give_weights is None:
            return
        async with aclosing(self.give_weights(peer_id, request)) as items:
            async for item in items:
                yield item
                self._counters.weights_bytes_out += len(item)


async def _find_none(ids: Sequence[bytes]) -> Sequence[bytes]:
    return ()
