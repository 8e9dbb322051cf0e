"""Which peers are one network neighbour for share caps: identities are free, addresses in many networks are not.

A neighbourhood is a public IPv4 /24 or IPv6 /48. Loopback and private addresses, and those of a relay, say nothing
about who is behind them: there every peer is a neighbourhood of its own.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MIN_PARTS = 3  # "", "ip4", host
PREFIX_BITS = {4: 24, 6: 48}


def neighbourhood_of(multiaddrs: Iterable[str]) -> str | None:
    """The neighbourhood of a peer that is connected by these addresses; the first public one counts."""
    return next(filter(None, map(_prefix_of, multiaddrs)), None)


def _prefix_of(multiaddr: str) -> str | None:
    parts = multiaddr.split("/")
    if len(parts) < MIN_PARTS or parts[1] not in ("ip4", "ip6") or "p2p-circuit" in parts:
        return None
    try:
        address = ipaddress.ip_address(parts[2])
    except ValueError:
        return None
    if not address.is_global:
        return None
    return str(ipaddress.ip_network((address, PREFIX_BITS[address.version]), strict=False))
