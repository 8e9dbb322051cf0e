"""Client for p2pd's control socket: one request on each connection.

hivemind's client lacks gossipsub, leaves connections open after a canceled call, and reads frames of any length. A
broken or silent control socket raises OSError or EOFError (TimeoutError is an OSError): p2pd has ended or hangs. An
error reported by p2pd raises `P2pdError`. Peers whose key is not Ed25519 are dropped and counted in this file.

Messages: https://github.com/learning-at-home/go-libp2p-daemon/blob/master/pb/p2pd.proto
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from ftis_node.errors import NetworkError
from ftis_node.gossip.p2pd.hivemind_bindings import (
    address_bytes,
    address_texts,
    p2pd_pb2,
    read_pbmsg_safe,
    socket_bytes,
    write_pbmsg,
)
from ftis_node.gossip.types import GossipCounters, GossipMessage, PeerConnection
from ftis_node.records.addresses import AddressError
from ftis_node.records.identity import ed25519_peer_id, peer_id_from_text
from ftis_node.swarm.peer_guard import UNPROVEN, PeerGuard, Place

Request = p2pd_pb2.Request
PSRequest = p2pd_pb2.PSRequest
T = TypeVar("T")
CANCEL_AGAIN_S = 1.0  # wait before a task that has not ended is canceled again


async def shielded_call(work: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
    """Return the result of `work`, run in its own task. If this call is canceled, that task is not awaited.

    Before Python 3.12 `asyncio.wait_for`, with which hivemind waits for each peer, may swallow a cancellation
    (https://github.com/python/cpython/issues/86296). Raises TimeoutError after `timeout_s`, and what `work` raises.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(_consume_error)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks repeatedly until they have ended; ignore their results."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    for task in tasks:
        _consume_error(task)


@asynccontextmanager
async def first_done(*work: Awaitable[Any]) -> AsyncIterator[Sequence[asyncio.Future[Any]]]:
    """Run `work` in tasks, and the block as soon as one has ended. Cancel all at the end of the block."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        yield tasks
    finally:
        await cancel_and_wait(*tasks)


def _consume_error(task: asyncio.Future[Any]) -> None:
    """Retrieve the task's error, so that asyncio does not report it as never retrieved."""
    if not task.cancelled():
        task.exception()


class P2pdError(NetworkError):
    """p2pd reported that a request failed."""


class P2pdClient:
    """Requests to one p2pd. `timeout_s` bounds those that p2pd answers itself, without a peer."""

    def __init__(
        self,
        path: Path,
        *,
        timeout_s: float,
        counters: GossipCounters | None = None,
        guard: PeerGuard | None = None,
    ) -> None:
        self._path = path
        self._guard = guard or PeerGuard()
        self._timeout_s = timeout_s
        self._counters = counters or GossipCounters()
        self._ignored: set[bytes] = set()  # connected peers whose key is not Ed25519

    async def identify(self) -> tuple[str, ...]:
        """Return the addresses that p2pd listens on or announces, without `/p2p/ID`."""
        response = await self._call(Request(type=Request.IDENTIFY))
        return address_texts(response.identify.addrs)

    async def connect(self, peer_id: str, addresses: Iterable[str], *, timeout_s: float) -> None:
        """Connect to a peer by any of `addresses`, or by those that p2pd remembers if none are given.

        Invalid addresses are skipped. Raises P2pdError, which names each address and its error.
        """
        request = p2pd_pb2.ConnectRequest(
            peer=_raw_id(peer_id), addrs=_usable(list(addresses)), timeout=max(1, round(timeout_s))
        )
        await self._call(Request(type=Request.CONNECT, connect=request), extra_s=timeout_s)

    async def connected_peers(self) -> list[PeerConnection]:
        """Return the connected peers that have an Ed25519 key."""
        response = await self._call(Request(type=Request.LIST_PEERS))
        addresses: dict[str, tuple[str, ...]] = {}
        ignored: set[bytes] = set()
        for peer in response.peers:  # one entry for each connection
            with self._guard.work_for(UNPROVEN, Place.PRESENCE):
                peer_id = ed25519_peer_id(peer.id)
                if peer_id is None:
                    ignored.add(peer.id)
                else:
                    addresses[peer_id] = addresses.get(peer_id, ()) + address_texts(peer.addrs)
        for _ in ignored - self._ignored:
            self._counters.non_ed25519["connection"] += 1
        self._ignored = ignored
        return [PeerConnection(peer_id, known) for peer_id, known in addresses.items()]

    async def publish(self, topic: str, payload: bytes) -> None:
        request = PSRequest(type=PSRequest.PUBLISH, topic=topic, data=payload)
        await self._call(Request(type=Request.PUBSUB, pubsub=request))

    @asynccontextmanager
    async def subscribe(self, topic: str) -> AsyncIterator[AsyncIterator[GossipMessage]]:
        """Yield the messages of a topic, own ones too, while the context is open; they end with EOFError."""
        request = PSRequest(type=PSRequest.SUBSCRIBE, topic=topic)
        subscribing = Request(type=Request.PUBSUB, pubsub=request)
        async with self._connection(subscribing, timeout_s=self._timeout_s) as (reader, _):
            yield self._messages(reader)

    def stream(
        self, peer_id: str, protocol: str, *, timeout_s: float
    ) -> AbstractAsyncContextManager[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a stream to a peer. Raises P2pdError if the peer is unreachable or does not support `protocol`."""
        request = p2pd_pb2.StreamOpenRequest(peer=_raw_id(peer_id), proto=[protocol], timeout=max(1, round(timeout_s)))
        return self._connection(Request(type=Request.STREAM_OPEN, streamOpen=request), timeout_s=timeout_s)

    async def handle_streams(self, protocols: Sequence[str], socket_path: Path) -> None:
        """Make p2pd forward incoming streams of `protocols` to the unix socket at `socket_path`."""
        request = p2pd_pb2.StreamHandlerRequest(addr=socket_bytes(socket_path), proto=list(protocols), balanced=False)
        await self._call(Request(type=Request.STREAM_HANDLER, streamHandler=request))

    async def _call(self, request: Any, *, extra_s: float = 0.0) -> Any:
        async with asyncio.timeout(self._timeout_s + extra_s):
            reader, writer = await asyncio.open_unix_connection(self._path)
            try:
                return await self._exchange(reader, writer, request)
            finally:
                writer.transport.abort()

    @staticmethod
    async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Any) -> Any:
        await write_pbmsg(writer, request)
        response = p2pd_pb2.Response()
        await read_pbmsg_safe(reader, response)
        if response.type == p2pd_pb2.Response.ERROR:
            raise P2pdError(" ".join(response.error.msg.split()))
        return response

    @asynccontextmanager
    async def _connection(
        self, request: Any, *, timeout_s: float
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        async with asyncio.timeout(timeout_s):  # a stopped p2pd accepts no connection once its backlog is full
            reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            async with asyncio.timeout(timeout_s):
                await self._exchange(reader, writer, request)
            yield reader, writer
        finally:
            writer.transport.abort()  # without waiting for unsent bytes, also if the task is canceled

    async def _messages(self, reader: asyncio.StreamReader) -> AsyncIterator[GossipMessage]:
        while True:
            message = p2pd_pb2.PSMessage()
            await read_pbmsg_safe(reader, message)
            author = ed25519_peer_id(getattr(message, "from"))
            if author is None:
                self._counters.non_ed25519["message"] += 1
            else:
                yield GossipMessage(sender=author, payload=message.data)


def _raw_id(peer_id: str) -> bytes:
    try:
        return peer_id_from_text(peer_id)
    except ValueError as error:
        raise P2pdError(str(error)) from None


def _usable(addresses: Sequence[str]) -> list[bytes]:
    raws, errors = [], []
    for address in addresses:
        try:
            raws.append(address_bytes(address))
        except AddressError as error:
            errors.append(f"{address}: {error}")
    if errors and not raws:
        raise P2pdError("; ".join(errors))
    return raws
