"""Whether others can dial this node, as far as its own addresses tell.

p2pd asks peers to dial it back, and takes a relay where they fail; then its list of addresses has one through the
relay. That is the only way in which it tells.
"""

from __future__ import annotations

from enum import StrEnum
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

CIRCUIT = "/p2p-circuit"


class Reachability(StrEnum):
    """By what kind of address a node can be dialled."""

    UNKNOWN = "unknown"  # no address yet
    LOCAL = "local"  # from its own network; behind NAT until a relay is found
    RELAYED = "relayed"  # through a relay: others tried to dial it, and could not
    PUBLIC = "public"  # from everywhere, unless a firewall stands before it: then a relay will be found


def reachability_of(addresses: Iterable[str]) -> Reachability:
    """How a node with these multiaddrs can be dialled."""
    addresses = list(addresses)
    if any(CIRCUIT in address for address in addresses):
        return Reachability.RELAYED
    if any(map(is_public, addresses)):
        return Reachability.PUBLIC
    return Reachability.LOCAL if addresses else Reachability.UNKNOWN


def is_public(address: str) -> bool:
    """Whether a multiaddr begins with a name or a global IP address."""
    _, kind, host, *_ = [*address.split("/"), "", ""]
    if kind.startswith("dns"):
        return True
    try:
        return ip_address(host).is_global
    except ValueError:
        return False
