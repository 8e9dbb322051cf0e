"""The limits of the HTTP ports: silent connections, malformed requests, clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import subprocess
import sys
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import pytest
from aiohttp import ClientSession, web

from ftis_node.config.home import TOKEN_HEADER, Home
from ftis_node.dashboard.web import DashboardServer
from ftis_node.node.http_api import local_api as http
from ftis_node.node.http_api.auth import is_same_secret
from ftis_node.node.http_api.connection_limits import HttpGuard, HttpLimits
from ftis_node.node.http_api.local_api import LocalApi
from ftis_node.node.http_api.monitoring_api import MonitoringApi, serve_observed
from ftis_node.node.peers.manager import PeerManager
from ftis_node.node.peers.operator_actions import PeerControl
from ftis_node.node.startup.wiring import Wiring
from tests.node.nodes import components
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from aiohttp.typedefs import Handler

    from ftis_node.node.loops.status import StatusLoop

HALF = b"GET /status HTTP/1.1\r\nHost: 127"
QUICK = HttpLimits(connections=100, connections_per_address=50, request_s=1.0, keep_alive_s=0.5)
TOKEN = "0f" * 32
PEER = b'{"peer": "12D3KooWFLAyEDfpb3cDnXBP7JfUnuKAgz7tPeRwEUSmSunbS8dP"'
Response = tuple[int, bytes]


class FailingPeers(PeerManager):
    """A peer manager whose `ban` fails."""

    def ban(self, peer_id: str, length_s: float | None = None) -> None:
        raise TypeError("not callable")


class Api(NamedTuple):
    """The local port of a node without loops, and its status."""

    api: LocalApi
    status: StatusLoop
    token_file: Path


@contextmanager
def local_api(folder: Path) -> Iterator[Api]:
    with components(folder) as node:
        wiring = Wiring(node)
        status, token_file = wiring.status_loop(), node.home.control_token
        peers = FailingPeers(
            folder / "other.sqlite", own_id="", settings=node.context.settings.access, events=node.context.events
        )
        control = PeerControl(peers, list)
        yield Api(LocalApi(status, wiring.peer_table, control=control, token_file=token_file), status, token_file)
        peers.close()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Api]:
    with local_api(tmp_path) as made:
        yield made


@pytest.fixture
def status(made: Api) -> StatusLoop:
    return made.status


@pytest.fixture
async def port(made: Api, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(http, "EVENT_PERIOD_S", 0.02)
    async with made.api.serve(port=0) as url:
        yield int(url.rsplit(":", 1)[1])


async def send(port: int, request: bytes, *, timeout_s: float = 10.0) -> Response:
    """Send raw bytes and return the status code and the whole response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(timeout_s):
            writer.write(request)
            response = await reader.readuntil(b"\r\n\r\n")
            length = [line for line in response.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            response += await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
    finally:
        writer.close()
    return int(response.split()[1]), response


def get(path: str, *headers: bytes, host: bytes = b"127.0.0.1") -> bytes:
    return b"\r\n".join([f"GET {path} HTTP/1.1".encode(), b"Host: " + host, *headers, b"", b""])


async def show_text(request: web.Request) -> web.Response:
    return web.Response(text="here")


async def guarded(limits: HttpLimits, handler: Handler = show_text) -> tuple[HttpGuard, AsyncExitStack, int]:
    app = web.Application()
    app.router.add_get("/status", handler)
    guard, stack = HttpGuard(limits=limits), AsyncExitStack()
    port = await stack.enter_async_context(guard.open_port(app, "127.0.0.1", 0, name="it", remedy="none"))
    return guard, stack, port


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


async def test_300_connections_with_half_a_header_are_closed_and_requests_are_answered() -> None:
    guard, serving, port = await guarded(QUICK)
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
    for _, writer in idle:
        writer.write(HALF)
    assert (await send(port, get("/status")))[0] == 200
    async with asyncio.timeout(10):
        assert all(await asyncio.gather(*(is_closed(reader) for reader, _ in idle)))
        assert (await send(port, get("/status")))[0] == 200
    for _, writer in idle:
        writer.close()
    await serving.aclose()
    assert guard.refused["crowded"] + guard.refused["slow"] == 300  # the speed of the machine decides how many of each
    assert guard.refused["crowded"] > 0 and guard.refused["slow"] >= 40


async def test_slow_bytes_do_not_extend_the_limit_and_an_idle_kept_connection_is_closed() -> None:
    guard, serving, port = await guarded(QUICK)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    closed = asyncio.create_task(is_closed(reader))
    writer.write(HALF)
    while not closed.done():  # one byte at a time, without end
        writer.write(b"7")
        await asyncio.sleep(0.1)
    assert await closed
    writer.close()
    assert guard.refused == {"slow": 1}
    kept, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        writer.write(get("/status"))
        assert (await kept.readuntil(b"here")).startswith(b"HTTP/1.1 200")
    async with asyncio.timeout(30):  # aiohttp's default is 75 s
        assert await is_closed(kept)
    writer.close()
    await serving.aclose()
    assert guard.refused == {"slow": 1}, "a finished client counts as refused"


@pytest.mark.parametrize("delay_s", [0.0, 0.2], ids=["before the response starts", "during the response"])
async def test_a_client_that_half_closes_gets_its_response(delay_s: float) -> None:
    async def show_later(request: web.Request) -> web.Response:
        await asyncio.sleep(0.4)
        return web.Response(text="here")

    guard, serving, port = await guarded(HttpLimits(keep_alive_s=60.0), show_later)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(get("/status"))
    await asyncio.sleep(delay_s)
    writer.write_eof()
    async with asyncio.timeout(10):  # the port closes the connection, although its keep-alive limit is longer
        response = await reader.read()
    assert response.startswith(b"HTTP/1.1 200") and response.endswith(b"here")
    writer.close()
    await serving.aclose()
    assert guard.refused == {}


@pytest.mark.parametrize("sent", [b"", HALF], ids=["nothing", "half a header"])
async def test_a_client_that_half_closes_without_a_request_is_closed(sent: bytes) -> None:
    _, serving, port = await guarded(HttpLimits(request_s=60.0))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    writer.write_eof()
    async with asyncio.timeout(20):
        assert await is_closed(reader)
    writer.close()
    await serving.aclose()


async def test_a_connection_beyond_the_limit_is_closed_while_all_others_are_busy() -> None:
    begun, release = asyncio.Semaphore(0), asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        begun.release()
        await release.wait()
        return web.Response(text="here")

    guard, serving, port = await guarded(HttpLimits(connections=4, connections_per_address=2), wait)
    busy = [asyncio.create_task(send(port, get("/status"))) for _ in range(2)]
    async with asyncio.timeout(10):
        await begun.acquire()
        await begun.acquire()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await is_closed(reader)
    writer.close()
    release.set()
    assert [code for code, _ in await asyncio.gather(*busy)] == [200, 200]
    await serving.aclose()
    assert guard.refused == {"crowded": 1}


@pytest.mark.parametrize(
    ("request_bytes", "code", "reason"),
    [
        (get("/status", host=b"["), 403, "forbidden"),
        (get("/status", host=b"\xff"), 403, "forbidden"),
        (get("/status", host=b"evil.example"), 403, "forbidden"),
        (get("/status", b"Host: twice"), 400, "malformed"),
        (get("/status", b"X: " + b"a" * 70_000), 400, "malformed"),
        (get("/status", b"Transfer-Encoding: nonsense"), 400, "malformed"),
        (b"\x00\xff\xfe\r\n\r\n", 400, "malformed"),
        (get("/elsewhere"), 404, "unknown"),
        (get("/peers/ban"), 405, "unknown"),
    ],
)
async def test_an_invalid_request_is_refused_and_counted_without_a_traceback(
    port: int, status: StatusLoop, caplog: pytest.LogCaptureFixture, request_bytes: bytes, code: int, reason: str
) -> None:
    with caplog.at_level(logging.INFO):
        assert (await send(port, request_bytes))[0] == code
    assert status.http_refused == {reason: 1}
    assert caplog.text == ""
    assert (await send(port, get("/status")))[0] == 200


def post(token: bytes, body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /peers/ban HTTP/1.1", b"Host: 127.0.0.1", f"{TOKEN_HEADER}: ".encode() + token]
    return b"\r\n".join([*lines, *headers, b"Content-Length: %d" % len(body), b"", body])


@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        (b"[" * 4000, (), "nested too deep"),
        (b"{" * 4000, (), "not JSON"),
        (b"{}", (b"Content-Type: application/json; charset=nosuch",), "no peer"),
        (b'{"peer": "\xff"}', (), "not JSON"),
        (b'{"peer": "\\ud800"}', (), "no peer"),
        (PEER + b', "for_s": 1' + b"0" * 3000 + b"}", (), "ban"),
        (PEER + b', "for_s": 1' + b"0" * 4300 + b"}", (), "413"),
        (PEER + b', "for_s": NaN}', (), "ban"),
        (b'{"peer": "' + b"a" * 4000 + b'"}', (), "no peer"),
    ],
)
async def test_an_invalid_body_is_a_short_one_line_error(
    port: int,
    made: Api,
    caplog: pytest.LogCaptureFixture,
    body: bytes,
    headers: tuple[bytes, ...],
    message: str,
) -> None:
    code, response = await send(port, post(made.token_file.read_bytes(), body, *headers))
    if message == "413":
        assert code == 413
    else:
        assert code == 400, response
        line = json.loads(response.partition(b"\r\n\r\n")[2])["error"]
        assert message in line and len(line) < 400
    assert caplog.text == ""


async def test_bytes_that_are_not_text_are_refused_as_a_token(port: int, caplog: pytest.LogCaptureFixture) -> None:
    assert (await send(port, post(b"\xff", b"{}")))[0] == 403
    async with serve_observed(observed := MonitoringApi(), ("127.0.0.1", 0), token=TOKEN) as other:
        assert other is not None
        assert (await send(other, get("/metrics", b"Authorization: Bearer \xff")))[0] == 401
        assert (await send(other, get("/metrics", f"Authorization: Bearer {TOKEN}".encode())))[0] == 200
        assert observed.refused == {"token": 1}
    assert is_same_secret("a", "a")
    assert not is_same_secret("\udcff", "a") and not is_same_secret("\ud800", "a")
    assert caplog.text == ""


async def test_a_body_that_does_not_arrive_is_refused(
    port: int, made: Api, status: StatusLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ftis_node.node.http_api.local_api.BODY_S", 0.2)
    request = post(made.token_file.read_bytes(), b"{}").replace(b"Content-Length: 2", b"Content-Length: 999")
    assert (await send(port, request))[0] == 408
    assert status.http_refused == {"slow": 1} and caplog.text == ""


async def test_a_client_of_the_events_that_disconnects_causes_no_traceback(
    port: int, status: StatusLoop, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/events"))
        await reader.readuntil(b"data: ")
        writer.transport.abort()
    await asyncio.sleep(0.3)
    assert caplog.text == "" and status.http_refused == {}
    assert (await send(port, get("/status")))[0] == 200


async def test_the_number_of_event_streams_is_limited(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_STREAMS", 2)
    async with ClientSession() as session:
        streams = [await session.get(f"http://127.0.0.1:{port}/events") for _ in range(2)]
        async with session.get(f"http://127.0.0.1:{port}/events") as third:
            assert third.status == 503
        assert (await send(port, get("/status")))[0] == 200
        for stream in streams:
            stream.close()


async def test_a_failed_response_is_a_500_and_logged_once_a_minute(
    port: int, status: StatusLoop, caplog: pytest.LogCaptureFixture
) -> None:
    status.latest = None  # type: ignore[assignment]
    for _ in range(3):
        assert (await send(port, get("/status")))[0] == 500
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert status.http_refused == {"fault": 3}


async def test_the_dashboard_in_a_browser_has_the_same_limits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = DashboardServer(Home(tmp_path), host="127.0.0.1", port=0, token=TOKEN)
    async with server.opened() as port:
        invalid = {
            403: get("/", host=b"["),
            400: b"\x00\xff\r\n\r\n",
            401: get("/", b"Cookie: ftis-dashboard-0=\xff"),
        }
        for code, request in invalid.items():
            assert (await send(port, request))[0] == code
        assert (await send(port, get("/", b"Origin: http://[")))[0] == 403
        assert (await send(port, get("/?token=%FF")))[0] == 401
        assert server.guard.refused == {"forbidden": 2, "malformed": 1, "token": 2}
    assert caplog.text == ""


SERVER = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
from pathlib import Path
from tests.node.http_api.test_connection_limits import local_api
from ftis_node.node.http_api.connection_limits import HttpLimits
from ftis_node.telemetry.faults import unhandled_errors

async def main():
    if sys.argv[2] == "unlimited":
        HttpLimits.__init__.__defaults__ = (10**6, 10**6, 600.0, 600.0)
    with local_api(Path(sys.argv[1])) as made:
      async with made.api.serve(port=0) as url:
        with unhandled_errors(lambda where, error: sys.exit(f"{where}: {error}")):
            print(url, flush=True)
            await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("limits", ["limited", "unlimited"])
def test_more_connections_than_descriptors_do_not_end_the_server(tmp_path: Path, limits: str) -> None:
    """With `unlimited`, the guard accepts so many connections that the accept loop finds no descriptor."""
    command = [sys.executable, "-c", SERVER, str(tmp_path), limits]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stderr is not None
        try:
            port = int(server.stdout.readline().rsplit(":", 1)[1])
            many = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(150)]
            if limits == "limited":
                assert _first_line(port).startswith(b"HTTP/1.1 200")
            for connection in many:
                connection.close()
            wait_until(lambda: _first_line(port).startswith(b"HTTP/1.1 200"))
            assert server.poll() is None
        finally:
            server.kill()
            errors = server.stderr.read()
    assert "Traceback" not in errors, errors


def _first_line(port: int) -> bytes:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(get("/status"))
            return client.recv(64)
    except OSError:
        return b""


async def test_the_address_without_a_path_links_to_the_documents(port: int) -> None:
    code, page = await send(port, get("/"))
    assert code == 200 and b"text/html" in page
    links = re.findall(rb'href="([^"]+)"', page)
    assert {b"/status", b"/metrics", b"/healthz"} <= set(links)
    for path in set(links) - {b"/events"}:
        path_code, _ = await send(port, get(path.decode()))
        assert path_code in (200, 503), path
