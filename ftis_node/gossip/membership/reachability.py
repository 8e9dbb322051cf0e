"""Derives from a node's own addresses how peers can dial it.

p2pd requests dials from peers, and uses a relay if they fail. Then its list of addresses contains one through the
relay. p2pd reports its reachability in no other way.
"""

from __future__ import annotations

from enum import StrEnum
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

CIRCUIT = "/p2p-circuit"


class Reachability(StrEnum):
    """Reachability of a node according to its addresses."""

    UNKNOWN = "unknown"  # no address yet
    LOCAL = "local"  # from the local network only; behind NAT until a relay is found
    RELAYED = "relayed"  # through a relay, because peers failed to dial it
    PUBLIC = "public"  # from everywhere, unless a firewall blocks it; then a relay will be found


def reachability_of(addresses: Iterable[str]) -> Reachability:
    """Return how a node with these multiaddrs can be dialed."""
    addresses = list(addresses)
    if any(CIRCUIT in address for address in addresses):
        return Reachability.RELAYED
    if any(map(is_public, addresses)):
        return Reachability.PUBLIC
    return Reachability.LOCAL if addresses else Reachability.UNKNOWN


def is_public(address: str) -> bool:
    """Return whether a multiaddr starts with a DNS name or a global IP address."""
    _, kind, host, *_ = [*address.split("/"), "", ""]
    if kind.startswith("dns"):
        return True
    try:
        return ip_address(host).is_global
    except ValueError:
        return False
