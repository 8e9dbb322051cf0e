"""Raw HTTP requests, also malformed ones."""

import asyncio


async def send(port: int, request: bytes, *, timeout_s: float = 10.0) -> tuple[int, bytes]:
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
