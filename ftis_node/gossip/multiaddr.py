"""Parses addresses that users type, and derives from a node's own addresses how peers can dial it.

Error messages show the right form of an address. `records/addresses.py` has the forms.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from ftis_node.errors import ConfigError
from ftis_node.records.addresses import IPS, Address, AddressError, block_of, parse_address, shown

HOST_AND_PORT = re.compile(r"([0-9.]{0,15}):?([0-9]{1,5})")  # the form of other programs' listen options
EXAMPLE = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."
CIRCUIT = "/p2p-circuit"


class PeerAddress(NamedTuple):
    """A peer and one path to it; `text` is the whole multiaddr, `transport` it without the final `/p2p/ID`."""

    peer_id: str
    text: str
    transport: str


def parse_multiaddr(text: str) -> PeerAddress:
    """Return the peer address in `text`. Raises ConfigError with the defect in one line."""
    address = _parsed(text)
    if address.peer_id is None:
        problem = f"the peer address {shown(text)} does not say which peer"
        raise ConfigError(f"{problem}: it must end in /p2p/ID, as in {EXAMPLE}")
    if address.port == 0:
        raise ConfigError(f"the peer address {shown(text)} has port 0: write it like {EXAMPLE}")
    return PeerAddress(address.peer_id, address.text, address.without_peer.text)


def parse_listen_address(text: str) -> Address:
    """Return the listen address in `text`, such as `/ip4/0.0.0.0/tcp/4001`. Raises ConfigError if it is invalid."""
    if plain := HOST_AND_PORT.fullmatch(text):
        host = plain[1] or "0.0.0.0"  # nosec B104: an example in a message
        raise ConfigError(f"cannot listen on {text!r}: write it as /ip4/{host}/tcp/{plain[2]}")
    address = _parsed(text)
    if address.names[0] not in IPS or address.peer_id is not None or "p2p-circuit" in address.names:
        problem = f"cannot listen on {shown(text)}"
        raise ConfigError(f"{problem}: write it like /ip4/0.0.0.0/tcp/4001 (port 0: any free port)")
    return address


def check_announced_address(text: str) -> None:
    """Raise ConfigError unless `text` is an address of this machine without a peer, such as `/dns4/NAME/tcp/4001`."""
    try:
        address = parse_address(text)
        why = "it needs a port, and no /p2p/ID" if "p2p" in address.names or address.port == 0 else ""
        why = why or ("nodes dial no link-local address" if is_link_local(address) else "")
    except AddressError as error:
        why = str(error)
    if why:
        raise ConfigError(f"cannot announce {shown(text)} ({why}): write it like /dns4/meet.example.org/tcp/4001")


def _parsed(text: str) -> Address:
    try:
        return parse_address(text)
    except AddressError as error:
        raise ConfigError(f"the address {shown(text)} cannot be used ({error}): write it like {EXAMPLE}") from None


class Reachability(StrEnum):
    UNKNOWN = "unknown"  # no address yet
    LOCAL = "local"  # from the local network only; behind NAT until a relay is found
    RELAYED = "relayed"  # through a relay, because peers failed to dial it
    PUBLIC = "public"  # from everywhere, unless a firewall blocks it; then a relay will be found


def reachability_of(addresses: Iterable[str]) -> Reachability:
    """Return how a node with these multiaddrs can be dialed. p2pd adds one through a relay if peers failed to dial it.

    p2pd reports its reachability in no other way.
    """
    addresses = list(addresses)
    if any(CIRCUIT in address for address in addresses):
        return Reachability.RELAYED
    if any(map(is_public, addresses)):
        return Reachability.PUBLIC
    return Reachability.LOCAL if addresses else Reachability.UNKNOWN


def is_public(address: str) -> bool:
    """Return whether a multiaddr starts with a DNS name or a global IP address."""
    block = block_of(address)
    return block is not None and block.is_public


def usable_addresses(peer_id: str, claimed: Iterable[str]) -> list[str]:
    """Return the valid addresses among a peer's claims that name no other peer, without the final `/p2p/ID`.

    Link-local addresses are left out: clouds serve the secrets of a machine at one. Other private addresses stay,
    because members of one cluster or VPN often have addresses in different blocks.
    """
    believable = []
    for text in claimed:
        try:
            address = parse_address(text)
        except AddressError:
            continue
        if address.peer_id in (peer_id, None) and address.port and not is_link_local(address):
            believable.append(address.without_peer.text)
    return list(dict.fromkeys(believable))


def is_link_local(address: Address) -> bool:
    return address.names[0] in IPS and ipaddress.ip_address(address.host).is_link_local
