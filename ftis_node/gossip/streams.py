"""Server of the streams of peers, which p2pd forwards to a unix socket.

A handler takes a peer id and its request and yields items. It does not know frames, slots or time limits.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from pathlib import Path

from ftis_node.errors import RecordError
from ftis_node.gossip.frames import Frame, read_frame, write_frame
from ftis_node.gossip.names import service_of
from ftis_node.gossip.p2pd.client import first_done
from ftis_node.gossip.p2pd.hivemind_bindings import p2pd_pb2, read_pbmsg_safe
from ftis_node.gossip.services import OverBudget
from ftis_node.gossip.session_parts import SessionParts
from ftis_node.gossip.types import ID_BYTES
from ftis_node.records.identity import ed25519_peer_id
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.rate_limits import PeerSlots

logger = logging.getLogger(__name__)

ACCEPT_ITERATIONS = 3  # iterations of the event loop between accept and the creation of the stream
FLOOD_FACTOR = 4  # streams up to this many times the limits get BUSY; those beyond are aborted


class StreamServer:
    def __init__(self, parts: SessionParts) -> None:
        self._parts = parts
        self._limits = parts.limits
        self._counters = parts.counters
        self._open = PeerSlots()
        self._max_open = FLOOD_FACTOR * parts.limits.max_streams
        self._max_of_peer = FLOOD_FACTOR * parts.limits.max_streams_per_peer
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, path: Path) -> None:
        self._server = await asyncio.start_unix_server(self._accept, path=path)

    async def close(self) -> None:
        if self._server is not None:
            await close_server(self._server)
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._serving) >= self._max_open:
            self._counters.serve_errors["flood"] += 1
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve_counted(reader, writer), name="gossip-serve")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # also if the task is canceled before it starts

    async def _serve_counted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._limits.fetch_timeout_s):
                await self._serve(reader, writer)
        except TimeoutError:
            self._counters.serve_errors["timed_out"] += 1
        except (OSError, EOFError):
            self._counters.serve_errors["broken"] += 1
        except RecordError as error:
            self._counters.serve_errors[error.reason] += 1
        except Exception:  # an internal error: other streams and the node continue
            logger.exception("serving a stream failed")
            self._counters.serve_errors["fault"] += 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # With a limit of 0 `drain` waits until all is sent, so closing loses nothing.
        writer.transport.set_write_buffer_limits(high=0)
        info = p2pd_pb2.StreamInfo()
        await read_pbmsg_safe(reader, info)
        peer_id = ed25519_peer_id(info.peer)
        if peer_id is None:
            self._counters.non_ed25519["stream"] += 1
        elif self._parts.admission.is_refused(peer_id):
            self._counters.serve_errors["refused"] += 1
        elif (kind := self._take_slot(peer_id)) is None:
            self._counters.serve_errors["flood"] += 1
        else:
            try:
                with self._parts.guard.work_for(peer_id, Place.SERVE, passes=(OSError, EOFError, RecordError)) as work:
                    await self._serve_peer(peer_id, info.proto, reader, writer)
                if work.failed:
                    self._counters.serve_errors["fault"] += 1
            finally:
                self._open.release(peer_id, kind)

    def _take_slot(self, peer_id: str) -> str | None:
        return self._parts.admission.take_slot(self._open, peer_id, most=self._max_open, per_peer=self._max_of_peer)

    async def _serve_peer(
        self, peer_id: str, protocol: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        has_read = False
        try:
            with self._parts.admission.admitted(peer_id, service_of(protocol)):
                ciphertext = await self._read_request(reader)
                has_read = True
                await self._answer(peer_id, protocol, ciphertext, reader, writer)
        except OverBudget as error:
            self._counters.serve_errors[error.reason] += 1
            if not has_read:  # closing a stream with unread bytes resets it, and BUSY is lost
                await self._read_request(reader)
            await write_frame(writer, Frame.BUSY, idle_s=self._limits.idle_timeout_s)

    async def _answer(
        self, peer_id: str, protocol: str, ciphertext: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve while the peer is connected, so that a peer that has left occupies no slot during look-ups.

        A caller that only ended its writing half cannot get an answer: p2pd closes this socket whole in both cases.
        """
        sending_items = self._send_items(peer_id, protocol, ciphertext, writer)
        async with first_done(sending_items, reader.read(1)) as (sending, _):
            if not sending.done():
                raise EOFError("the peer disconnected")
            sending.result()  # raises the error of a failed send

    async def _send_items(self, peer_id: str, protocol: str, ciphertext: bytes, writer: asyncio.StreamWriter) -> None:
        own_id, cipher = self._parts.identity.peer_id, self._parts.cipher
        request = cipher.decrypt(ciphertext, "request", peer_id, own_id, protocol)
        async with aclosing(self._parts.handlers[protocol](peer_id, request)) as items:
            async for item in items:
                await self._parts.admission.before_item(peer_id, len(item))
                encrypted = cipher.encrypt(item, "item", own_id, peer_id, protocol, ciphertext)
                await write_frame(writer, Frame.ITEM, encrypted, idle_s=self._limits.idle_timeout_s)
        await write_frame(writer, Frame.END, idle_s=self._limits.idle_timeout_s)

    async def _read_request(self, reader: asyncio.StreamReader) -> bytes:
        max_bytes = max(self._limits.max_ids_per_request * ID_BYTES, self._limits.max_announcement_bytes)
        max_bytes += self._parts.cipher.overhead_bytes
        kind, request = await read_frame(reader, max_bytes=max_bytes, idle_s=self._limits.idle_timeout_s)
        if kind is not Frame.REQUEST:
            raise RecordError("frame_kind", f"a stream that starts with {kind.name}")
        return request


async def close_server(server: asyncio.Server) -> None:
    """Close a server once accepted connections are streams, because asyncio would leak their sockets otherwise."""
    for listening in server.sockets:
        asyncio.get_running_loop().remove_reader(listening.fileno())
    for _ in range(ACCEPT_ITERATIONS):
        await asyncio.sleep(0)
    server.close()
