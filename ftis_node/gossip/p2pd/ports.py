"""Checks before the start of p2pd that the listen addresses are free, because p2pd does not report a conflict.

libp2p listens with SO_REUSEPORT: two nodes on one port both start, and each gets some of the other's connections.
"""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

from ftis_node.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ftis_node.gossip.multiaddr import ListenAddress


def check_free(addresses: Iterable[ListenAddress]) -> None:
    """Raise UsageError, with the remedy, for the first address on which this node cannot listen."""
    for address in addresses:
        try:
            _try_to_bind(address)
        except OSError as error:
            raise UsageError(f"cannot listen on {address.text}: {_reason(error, address)}") from None


def pin_ports(requested: Sequence[ListenAddress], actual: Iterable[str]) -> tuple[ListenAddress, ...]:
    """Return `requested` with port 0 replaced by the chosen port, so that a restarted p2pd keeps its address."""
    pinned = []
    for address in requested:
        family = "ip6" if ":" in address.host else "ip4"
        parts = [text.split("/") for text in actual if text.startswith(f"/{family}/")]
        ports = [int(part[4]) for part in parts if part[3] == address.transport]
        pinned.append(address.with_port(ports[0]) if address.port == 0 and ports else address)
    return tuple(pinned)


def _try_to_bind(address: ListenAddress) -> None:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    kind = socket.SOCK_STREAM if address.transport == "tcp" else socket.SOCK_DGRAM
    with socket.socket(family, kind) as probe:
        if address.transport == "tcp":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT do not matter
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind((address.host, address.port))


def _reason(error: OSError, address: ListenAddress) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {address.port} is taken; choose another with --listen"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"this machine has no address {address.host}; choose another with --listen"
    if error.errno == errno.EACCES:
        return f"port {address.port} needs rights that this user lacks; choose one above 1023 with --listen"
    return f"{error.strerror}; choose another with --listen"
