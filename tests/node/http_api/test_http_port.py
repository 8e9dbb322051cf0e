"""An HTTP port: silent connections, malformed requests, failures of a handler; operator actions with a token."""

import asyncio
import errno
import json
import logging
from collections import Counter
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

import pytest
from aiohttp import web

from ftis_node.config.home import TOKEN_HEADER
from ftis_node.node.http_api import http_port
from ftis_node.node.http_api import routes as http
from ftis_node.node.http_api.access import is_same_secret
from ftis_node.node.http_api.routes import LocalApi, MonitoringApi, serve_observed
from ftis_node.node.peers.peer_manager import PeerManager
from ftis_node.node.wiring import Wiring
from tests.node.http_api.requests import get, send
from tests.node.nodes import components

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
    assert (refused, caplog.text) == ({reason: 1}, "")
    assert (await send(port, get("/status")))[0] == 200


async def test_a_failed_response_is_a_500_and_logged_once_a_minute(port, refused, caplog):
    for _ in range(3):
        assert (await send(port, get("/failing")))[0] == 500
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "a fault of the handler" in caplog.text
    assert refused == {"fault": 3}


TOKEN = "0f" * 32
PEER = b'{"peer": "12D3KooWFLAyEDfpb3cDnXBP7JfUnuKAgz7tPeRwEUSmSunbS8dP"'


class Served(NamedTuple):
    """The local port of a node without loops, its token, and its counter of refused requests."""

    port: int
    token: bytes
    refused: Counter[str]


@pytest.fixture
async def served(tmp_path):
    with components(tmp_path) as node:
        wiring, token_file = Wiring(node), node.home.control_token
        status = wiring.status_loop()
        api = LocalApi(status, wiring.swarm, token_file=token_file)
        async with api.serve(port=0) as url:
            yield Served(int(url.rsplit(":", 1)[1]), token_file.read_bytes(), status.http_refused)


def post(token: bytes, body: bytes, *headers: bytes, path: bytes = b"/peers/ban") -> bytes:
    lines = [b"POST " + path + b" HTTP/1.1", b"Host: 127.0.0.1", f"{TOKEN_HEADER}: ".encode() + token]
    return b"\r\n".join([*lines, *headers, b"Content-Length: %d" % len(body), b"", body])


@pytest.mark.parametrize("host", [b"[", b"\xff", b"evil.example"])
async def test_a_foreign_or_invalid_host_is_refused(served, host):
    assert (await send(served.port, get("/status", host=host)))[0] == 403
    assert served.refused == {"forbidden": 1}


async def test_an_invalid_body_is_a_short_one_line_error(served, caplog):
    for body, message in (
        (b"[" * 4000, "nested too deep"),
        (b"{" * 4000, "not JSON"),
        (b'{"peer": "\xff"}', "not JSON"),
        (b'{"peer": "\\ud800"}', "no peer"),
        (PEER + b', "for_s": 1' + b"0" * 3000 + b"}", "for_s"),
        (PEER + b', "for_s": NaN}', "for_s"),
        (b'{"peer": "' + b"a" * 4000 + b'"}', "no peer"),
    ):
        code, response = await send(served.port, post(served.token, body))
        assert code == 400, response
        line = json.loads(response.partition(b"\r\n\r\n")[2])["error"]
        assert message in line and len(line) < 400
    code, _ = await send(served.port, post(served.token, PEER + b', "for_s": 1' + b"0" * 4300 + b"}"))
    assert code == 413
    assert (await send(served.port, post(served.token, b"{}", b"Content-Type: a/b; charset=nosuch")))[0] == 400
    assert caplog.text == ""


async def test_a_node_without_workers_says_that_it_cannot_pause(served):
    for path in (b"/pause", b"/resume"):
        code, response = await send(served.port, post(served.token, b"{}", path=path))
        line = json.loads(response.partition(b"\r\n\r\n")[2])["error"]
        assert (code, line) == (400, "this node has no workers to pause or resume: stop its trainer instead")


async def test_a_change_that_the_disk_refuses_is_a_one_line_error(served, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PeerManager, "ban", refuse)
    code, response = await send(served.port, post(served.token, PEER + b"}"))
    line = json.loads(response.partition(b"\r\n\r\n")[2])["error"]
    assert (code, line) == (507, "the node cannot write to its home: [Errno 28] No space left on device")


async def test_bytes_that_are_not_text_are_refused_as_a_token(served, caplog):
    assert (await send(served.port, post(b"\xff", b"{}")))[0] == 403
    for method in (b"PUT ", b"DELETE ", b"PATCH "):  # no route has them; one that gets them needs the token, too
        assert (await send(served.port, post(b"", b"{}").replace(b"POST ", method)))[0] == 403
    async with serve_observed(observed := MonitoringApi(), ("127.0.0.1", 0), token=TOKEN) as other:
        assert other is not None
        assert (await send(other, get("/metrics", b"Authorization: Bearer \xff")))[0] == 401
        assert (await send(other, get("/metrics", f"Authorization: Bearer {TOKEN}".encode())))[0] == 200
        assert observed.refused == {"token": 1}
    assert is_same_secret("a", "a")
    assert not is_same_secret("\udcff", "a") and not is_same_secret("\ud800", "a")
    assert caplog.text == ""


async def test_a_body_that_does_not_arrive_is_refused(served, monkeypatch, caplog):
    monkeypatch.setattr(http, "BODY_S", 0.2)
    request = post(served.token, b"{}").replace(b"Content-Length: 2", b"Content-Length: 999")
    assert (await send(served.port, request))[0] == 408
    assert served.refused == {"slow": 1} and caplog.text == ""
