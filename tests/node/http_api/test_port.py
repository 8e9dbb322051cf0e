"""An HTTP port: silent connections, malformed requests, failures of a handler."""

import asyncio
import logging
from collections import Counter
from contextlib import AbstractAsyncContextManager

import pytest
from aiohttp import web

from ftis_node.node.http_api import port as http_port
from tests.node.http_api.requests import get, send

HALF = b"GET /status HTTP/1.1\r\nHost: 127"


@pytest.fixture
def refused():
    return Counter()


@pytest.fixture
async def port(refused, monkeypatch):
    monkeypatch.setattr(http_port, "REQUEST_S", 1.0)
    async with opened(refused) as port:
        yield port


def opened(refused: Counter[str]) -> AbstractAsyncContextManager[int]:
    app = web.Application()
    app.router.add_get("/status", show_text)
    app.router.add_get("/failing", fail)
    return http_port.open_port(app, "127.0.0.1", 0, name="it", remedy="none", refused=refused)


async def show_text(request: web.Request) -> web.Response:
    return web.Response(text="here")


async def fail(request: web.Request) -> web.Response:
    raise TypeError("a fault of the handler")


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


async def test_300_silent_connections_replace_each_other_and_requests_are_answered(refused):
    """Without a limit of connections they would be open for REQUEST_S."""
    async with opened(refused) as port, asyncio.timeout(http_port.REQUEST_S - 2.0):
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
        for _, writer in idle[::2]:
            writer.write(HALF)
        for _ in range(2):  # the second connection closes what the event loop accepted at once
            assert (await send(port, get("/status")))[0] == 200
        num_closed = 300 - http_port.MAX_CONNECTIONS
        assert all(await asyncio.gather(*(is_closed(reader) for reader, _ in idle[:num_closed])))
        assert refused["crowded"] >= num_closed
    for _, writer in idle:
        writer.close()


async def test_slow_bytes_do_not_extend_the_limit_and_an_idle_kept_connection_is_closed(port):
    for first in (b"", get("/status")):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first)
        if first:
            assert (await reader.readuntil(b"here")).startswith(b"HTTP/1.1 200")
        closed = asyncio.create_task(is_closed(reader))
        writer.write(HALF)
        async with asyncio.timeout(20):
            while not closed.done():  # one byte at a time, without end
                writer.write(b"7")
                await asyncio.sleep(0.1)
        assert await closed
        writer.close()


@pytest.mark.parametrize(
    ("request_bytes", "code", "reason"),
    [
        (get("/status", b"Host: twice"), 400, "malformed"),
        (get("/status", b"X: " + b"a" * 70_000), 400, "malformed"),
        (get("/status", b"Transfer-Encoding: nonsense"), 400, "malformed"),
        (b"\x00\xff\xfe\r\n\r\n", 400, "malformed"),
        (get("/elsewhere"), 404, "unknown"),
        (b"POST" + get("/status").removeprefix(b"GET"), 405, "unknown"),
    ],
)
async def test_an_invalid_request_is_refused_and_counted_without_a_traceback(
    port, refused, caplog, request_bytes, code, reason
):
    with caplog.at_level(logging.INFO):
        assert (await send(port, request_bytes))[0] == code
    assert refused == {reason: 1}
    assert caplog.text == ""
    assert (await send(port, get("/status")))[0] == 200


async def test_a_failed_response_is_a_500_and_logged_once_a_minute(port, refused, caplog):
    for _ in range(3):
        assert (await send(port, get("/failing")))[0] == 500
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "a fault of the handler" in caplog.text
    assert refused == {"fault": 3}
