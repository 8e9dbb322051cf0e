"""A TCP proxy in user space that can cut and delay connections.

Each node announces only the address of its `Proxy`. Connections are distinguished by their source host, so the link
between two nodes can be cut alone. A separate thread forwards the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

HOST = "127.0.0.1"
CHUNK_BYTES = 1 << 16


class Proxy:
    """The proxy of one node, for any thread. Each chunk is delayed by `delay_s` in both directions."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self.delay_s = 0.0
        self._cut_from: set[str] = set()
        self._connections: dict[asyncio.Task[None], str] = {}
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server

    @classmethod
    @contextlib.contextmanager
    def open(cls, to: tuple[str, int]) -> Iterator[Proxy]:
        proxy = cls(to)
        proxy._server = proxy._loop.run_until_complete(asyncio.start_server(proxy._accept, HOST, 0))
        thread = threading.Thread(target=proxy._loop.run_forever, name="proxy", daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            asyncio.run_coroutine_threadsafe(proxy._close(), proxy._loop).result(timeout=30)
            proxy._loop.call_soon_threadsafe(proxy._loop.stop)
            thread.join(timeout=30)
            proxy._loop.close()

    @property
    def address(self) -> str:
        """The multiaddress that the node announces."""
        return f"/ip4/{HOST}/tcp/{self._server.sockets[0].getsockname()[1]}"

    @property
    def host(self) -> str:
        """The host of the node behind the proxy, which is the source of the node's own connections."""
        return self._to[0]

    def cut(self, host: str) -> None:
        """Abort connections from `host` and refuse new ones until `restore`."""
        self._loop.call_soon_threadsafe(self._cut, host)

    def restore(self, host: str) -> None:
        """Accept connections from `host` again."""
        self._loop.call_soon_threadsafe(self._cut_from.discard, host)

    def _cut(self, host: str) -> None:
        self._cut_from.add(host)
        for task, source in self._connections.items():
            if source == host:
                task.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = writer.get_extra_info("peername")[0]
        if source in self._cut_from:
            writer.transport.abort()
            return
        task = self._loop.create_task(self._forward(reader, writer))
        self._connections[task] = source
        task.add_done_callback(lambda task: self._connections.pop(task, None))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy in both directions until one end closes."""
        target_writer = None
        try:
            target_reader, target_writer = await asyncio.open_connection(*self._to)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._copy(reader, target_writer))
                tasks.create_task(self._copy(target_reader, writer))
        except* OSError:
            pass  # one end closed the connection
        finally:
            writer.transport.abort()
            if target_writer is not None:
                target_writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy chunks in order, each after the delay. What arrives meanwhile is the next chunk."""
        while chunk := await reader.read(CHUNK_BYTES):
            await asyncio.sleep(self.delay_s)
            writer.write(chunk)
            await writer.drain()
        raise ConnectionResetError

    async def _close(self) -> None:
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
