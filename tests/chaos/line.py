"""A line between nodes: a TCP relay in user space that can be cut, and that can be made slow.

One `Line` stands before each node and is the only address that the node tells. Each connection is told by where it
comes from, so that the line between two nodes alone can be cut too. A thread of its own carries the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = "127.0.0.1"
CHUNK_BYTES = 1 << 16
ANY = ""


class Line:
    """The way to one node. Made by `open`; `cut`, `mend` and `delay` may be called from any thread."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self._delay_s = 0.0
        self._cut_from: set[str] = set()
        self._carrying: dict[asyncio.Task[None], str] = {}
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server

    @classmethod
    @contextlib.contextmanager
    def open(cls, to: tuple[str, int]) -> Iterator[Line]:
        """A line that listens on a free port of 127.0.0.1."""
        line = cls(to)
        line._server = line._loop.run_until_complete(asyncio.start_server(line._accept, HOST, 0))
        thread = threading.Thread(target=line._loop.run_forever, name="line", daemon=True)
        thread.start()
        try:
            yield line
        finally:
            asyncio.run_coroutine_threadsafe(line._close(), line._loop).result(timeout=30)
            line._loop.call_soon_threadsafe(line._loop.stop)
            thread.join(timeout=30)
            line._loop.close()

    @property
    def address(self) -> str:
        """What the node announces."""
        return f"/ip4/{HOST}/tcp/{self._server.sockets[0].getsockname()[1]}"

    @property
    def host(self) -> str:
        """The host of the node behind it: where connections that it makes itself come from."""
        return self._to[0]

    def cut(self, host: str = ANY) -> None:
        """Breaks the connections that come from `host` (any: all) and takes no new one, until mended."""
        self._loop.call_soon_threadsafe(self._cut, host)

    def mend(self, host: str = ANY) -> None:
        """Takes connections again."""
        self._loop.call_soon_threadsafe(self._cut_from.discard, host)

    def delay(self, seconds: float) -> None:
        """Has every piece arrive so much later, both ways; 0: as it comes."""
        self._delay_s = seconds

    def _is_cut(self, host: str) -> bool:
        return bool(self._cut_from & {ANY, host})

    def _cut(self, host: str) -> None:
        self._cut_from.add(host)
        for task, source in self._carrying.items():
            if self._is_cut(source):
                task.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = writer.get_extra_info("peername")[0]
        if self._is_cut(source):
            writer.transport.abort()
            return
        task = self._loop.create_task(self._carry(reader, writer))
        self._carrying[task] = source
        task.add_done_callback(lambda task: self._carrying.pop(task, None))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Both ways until either end has had enough."""
        onward = None
        try:
            far_reader, onward = await asyncio.open_connection(*self._to)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass_on(reader, onward))
                tasks.create_task(self._pass_on(far_reader, writer))
        except* OSError:
            pass  # one end is gone: so is the connection
        finally:
            writer.transport.abort()
            if onward is not None:
                onward.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What comes is handed on after the delay, in order; the reading does not wait for it."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=1024)

        async def hand_on() -> None:
            while True:
                due, piece = await waiting.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                if not piece:
                    raise ConnectionResetError
                writer.write(piece)
                await writer.drain()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hand_on())
            while piece := await reader.read(CHUNK_BYTES):
                await waiting.put((self._loop.time() + self._delay_s, piece))
            await waiting.put((self._loop.time() + self._delay_s, b""))

    async def _close(self) -> None:
        self._server.close()
        for task in list(self._carrying):
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)
