"""Addresses of the form HOST:PORT in settings and options."""

from __future__ import annotations

WILDCARDS = ("", "*", "0.0.0.0", "::")
MAX_PORT = 65535


def parse_endpoint(text: str, *, name: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT` or `[IPV6]:PORT`. Raises ValueError with `name` for anything else.

    The address of all interfaces is refused, because other hosts cannot connect to it.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdecimal() and 1 <= int(port) <= MAX_PORT) or (":" in host and "[" not in text):
        raise ValueError(f"{name} is {text!r}: give HOST:PORT, such as 10.0.0.1:29400")
    if host in WILDCARDS:
        raise ValueError(f"{name} is {text!r}: name one address of this host, not all interfaces")
    return host, int(port)
