"""The proxy of a node forwards bytes, can be cut for one client or for all, and can delay."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.chaos.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE, OTHER = "127.0.0.1", "127.0.0.21"
LIMIT_S = 20.0
DELAY_S = 0.2


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """Yield a proxy of an echo server."""
    with socket.create_server((HERE, 0)) as server:

        def echo(connection: socket.socket) -> None:
            with connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # the test has closed the server
                    return
                threading.Thread(target=echo, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        with Proxy.open(to=(HERE, server.getsockname()[1])) as proxy:
            yield proxy
        server.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=LIMIT_S)


@contextmanager
def client(proxy: Proxy, *, host: str) -> Iterator[socket.socket]:
    """Yield a connection through the proxy with the source address `host`."""
    port = int(proxy.address.rpartition("/")[2])
    with socket.create_connection((HERE, port), timeout=LIMIT_S, source_address=(host, 0)) as connection:
        yield connection


def answers(connection: socket.socket, text: bytes = b"hello") -> bool:
    """Return whether the server echoes the text."""
    try:
        connection.sendall(text)
        return connection.recv(64) == text
    except ConnectionError:
        return False


def test_a_cut_affects_connections_from_that_host_only(proxy: Proxy) -> None:
    with client(proxy, host=HERE) as one, client(proxy, host=OTHER) as other:
        assert answers(one) and answers(other)
        proxy.cut(OTHER)
        assert other.recv(1) == b""
        assert answers(one)
        with client(proxy, host=OTHER) as again:
            assert not answers(again), "new connections are refused too"
        proxy.restore(OTHER)
        with client(proxy, host=OTHER) as again:
            assert answers(again)


def test_a_cut_for_all_hosts_ends_with_restore(proxy: Proxy) -> None:
    proxy.cut()
    with client(proxy, host=HERE) as one:
        assert not answers(one)
    proxy.restore()
    with client(proxy, host=HERE) as one:
        assert answers(one)


def test_a_delay_applies_in_both_directions_and_keeps_the_order(proxy: Proxy) -> None:
    proxy.delay(DELAY_S)
    with client(proxy, host=HERE) as one:
        started_at = time.monotonic()
        for number in range(20):
            one.sendall(bytes([number]))
        received = b""
        while len(received) < 20:
            received += one.recv(64)
        assert received == bytes(range(20))
        assert 2 * DELAY_S <= time.monotonic() - started_at
