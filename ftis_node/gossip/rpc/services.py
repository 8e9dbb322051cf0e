"""Services for peers: bodies, confirmations, queries, weights. Each takes a request and yields items."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from ftis_node.gossip.rpc.frames import read_bodies, unpack_ids
from ftis_node.gossip.wire_names import RpcService

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from ftis_node.gossip.interface import (
        AnswerQuery,
        GossipCounters,
        GossipLimits,
        Lookup,
        OnConfirm,
        OnSent,
        ServeWeights,
    )

    Handler = Callable[[str, bytes], AsyncGenerator[bytes, None]]


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
