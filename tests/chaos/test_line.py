"""The line before a node: it carries, it can be cut for one caller or for all, and it can be slow."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.chaos.line import Line

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE, OTHER = "127.0.0.1", "127.0.0.21"
LIMIT_S = 20.0
DELAY_S = 0.2


@pytest.fixture
def line() -> Iterator[Line]:
    """A line to a server that says everything back."""
    with socket.create_server((HERE, 0)) as server:

        def echo(connection: socket.socket) -> None:
            with connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # closed: the test is over
                    return
                threading.Thread(target=echo, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        with Line.open(to=(HERE, server.getsockname()[1])) as line:
            yield line
        server.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=LIMIT_S)


@contextmanager
def caller(line: Line, *, host: str) -> Iterator[socket.socket]:
    """A connection through the line that comes from `host`."""
    port = int(line.address.rpartition("/")[2])
    with socket.create_connection((HERE, port), timeout=LIMIT_S, source_address=(host, 0)) as connection:
        yield connection


def answers(connection: socket.socket, text: bytes = b"hello") -> bool:
    """Whether what is said comes back."""
    try:
        connection.sendall(text)
        return connection.recv(64) == text
    except ConnectionError:
        return False


def test_a_cut_breaks_what_comes_from_there_and_nothing_else(line: Line) -> None:
    with caller(line, host=HERE) as one, caller(line, host=OTHER) as other:
        assert answers(one) and answers(other)
        line.cut(OTHER)
        assert other.recv(1) == b"" or pytest.fail("something came")
        assert answers(one)
        with caller(line, host=OTHER) as again:
            assert not answers(again), "no new one either"
        line.mend(OTHER)
        with caller(line, host=OTHER) as again:
            assert answers(again)


def test_a_cut_for_all_ends_with_its_mending(line: Line) -> None:
    line.cut()
    with caller(line, host=HERE) as one:
        assert not answers(one)
    line.mend()
    with caller(line, host=HERE) as one:
        assert answers(one)


def test_a_slow_line_is_late_both_ways_and_keeps_the_order(line: Line) -> None:
    line.delay(DELAY_S)
    with caller(line, host=HERE) as one:
        started_at = time.monotonic()
        for number in range(20):
            one.sendall(bytes([number]))
        come = b""
        while len(come) < 20:
            come += one.recv(64)
        assert come == bytes(range(20))
        assert 2 * DELAY_S <= time.monotonic() - started_at
