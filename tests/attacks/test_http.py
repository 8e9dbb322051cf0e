"""The victim's status port during training: silent connections, and invalid requests."""

import asyncio
from urllib.parse import urlsplit

import pytest

from ftis_node.config.home import Home
from tests.attacks.victim import Victim, wait_until_continued

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

NUM_IDLE = 300
CLOSED_WITHIN_S = 40.0
HALF_REQUEST = b"GET /status HTTP/1.1\r\nHost: 127."
ANSWER_S = 10.0
INVALID_REQUESTS = {
    "bytes for a token": b"GET /peers HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",
    "bytes for the control token": (
        b"POST /peers/ban HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Ftis-Token: \xff\r\nContent-Length: 2\r\n\r\n{}"
    ),
    "half a host": b"GET /status HTTP/1.1\r\nHost: [\r\n\r\n",
    "bytes for a host": b"GET /status HTTP/1.1\r\nHost: \xff\r\n\r\n",
    "no method": b"\x00\x01\x02 text\r\n\r\n",
    "two hosts": b"GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil\r\n\r\n",
    "a header of 64 KiB": b"GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + bytes([65]) * 65536 + b"\r\n\r\n",
}


def expected(request_bytes: bytes) -> tuple[bytes, ...]:
    """Return how the answer may begin. A port on loopback requires no bearer token, so it ignores an invalid one."""
    refused = (b"HTTP/1.1 4", b"HTTP/1.0 4")
    return (*refused, b"HTTP/1.1 200") if request_bytes == INVALID_REQUESTS["bytes for a token"] else refused


async def connect(victim: Victim) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection to the status port."""
    port = urlsplit(Home(victim.node.home).running_url() or "").port
    return await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("request_bytes", list(INVALID_REQUESTS.values()), ids=list(INVALID_REQUESTS))
async def test_an_invalid_request_is_refused_without_a_traceback(victim, request_bytes):
    before = victim.log_text().count("Traceback")
    reader, writer = await connect(victim)
    try:
        writer.write(request_bytes)
        async with asyncio.timeout(ANSWER_S):
            answer = await reader.readline()
    except ConnectionError:  # a closed connection is a refusal too
        answer = b"HTTP/1.1 4"
    finally:
        writer.transport.abort()
    assert answer == b"" or answer.startswith(expected(request_bytes)), answer
    assert victim.log_text().count("Traceback") == before


async def test_silent_connections_are_closed_during_training(victim, honest):
    held = await asyncio.gather(*(connect(victim) for _ in range(NUM_IDLE)))
    try:
        for _, writer in held[::2]:
            if not writer.is_closing():
                writer.write(HALF_REQUEST)
        await wait_until_continued(victim, honest)  # reads the status at the same port
        async with asyncio.timeout(CLOSED_WITHIN_S):
            await asyncio.gather(*(_until_closed(reader) for reader, _ in held))
    finally:
        for _, writer in held:
            writer.transport.abort()


async def _until_closed(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(4096):
            pass
    except ConnectionError:
        pass
