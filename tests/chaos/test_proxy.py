"""The proxy of a node forwards bytes, can be cut for one client or for all, and can delay."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from tests.chaos.proxy import ANY, Proxy

HERE, OTHER = "127.0.0.1", "127.0.0.21"
LIMIT_S = 20.0
DELAY_S = 0.2


class Echo(socketserver.BaseRequestHandler):
    """Send back what comes in."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            while data := self.request.recv(1 << 16):
                self.request.sendall(data)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """Yield a proxy of an echo server."""
    with socketserver.ThreadingTCPServer((HERE, 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        with Proxy.open(to=(HERE, server.server_address[1])) as proxy:
            yield proxy
        server.shutdown()
        thread.join(timeout=LIMIT_S)


def client(proxy: Proxy, host: str) -> socket.socket:
    """Return a connection through the proxy with the source address `host`."""
    port = int(proxy.address.rpartition("/")[2])
    return socket.create_connection((HERE, port), timeout=LIMIT_S, source_address=(host, 0))


def answers(connection: socket.socket) -> bool:
    """Return whether the server echoes."""
    try:
        connection.sendall(b"hello")
        return connection.recv(64) == b"hello"
    except ConnectionError:
        return False


@pytest.mark.parametrize(("cut", "is_cut"), [(OTHER, (False, True)), (ANY, (True, True))], ids=["one host", "all"])
def test_a_cut_affects_connections_from_that_host_until_it_is_restored(
    proxy: Proxy, cut: str, is_cut: tuple[bool, bool]
) -> None:
    with client(proxy, HERE) as here, client(proxy, OTHER) as other:
        assert answers(here) and answers(other)
        proxy.cut(cut)
        assert other.recv(1) == b"", "aborted"
        assert answers(here) is not is_cut[0]
        for host, expected in zip((HERE, OTHER), is_cut, strict=True):
            with client(proxy, host) as again:
                assert answers(again) is not expected, "new connections are refused too"
        proxy.restore(cut)
        with client(proxy, OTHER) as again:
            assert answers(again)


def test_a_delay_applies_in_both_directions_and_keeps_the_order(proxy: Proxy) -> None:
    proxy.delay(DELAY_S)
    with client(proxy, HERE) as one:
        started_at = time.monotonic()
        for number in range(20):
            one.sendall(bytes([number]))
        received = b""
        while len(received) < 20:
            received += one.recv(64)
        assert received == bytes(range(20))
        assert 2 * DELAY_S <= time.monotonic() - started_at
