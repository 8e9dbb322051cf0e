"""Network settings of one node."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ftis_node.backoff import ExponentialBackoff
from ftis_node.gossip.multiaddr import (
    PeerAddress,
    check_announced_address,
    parse_listen_address,
    parse_multiaddr,
)
from ftis_node.records.addresses import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """Settings of the network process and its connection loops. Raises ConfigError for an invalid address.

    `sockets_dir` belongs to this node alone; it is created if missing and emptied at each start.
    """

    sockets_dir: Path
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()  # published instead of the detected addresses; without /p2p/ID
    peers: tuple[str, ...] = ()  # dialed first: bootstrap nodes or members
    use_nat_helpers: bool = True  # port mapping, reachability checks, hole punching, relays
    start_timeout_s: float = 30.0
    num_start_tries: int = 2
    stop_timeout_s: float = 2.0
    num_relay_tries: int = 20  # starts of a bootstrap node until its relay has the limits below
    relay_bytes: int = 1 << 32  # relayed per connection and direction, before a bootstrap node closes the connection
    relay_connections_per_peer: int = 64
    relay_reservations: int = 1024  # peers for which a bootstrap node relays
    control_timeout_s: float = 20.0  # requests that p2pd answers itself
    dial_timeout_s: float = 10.0
    directory_rpc_timeout_s: float = 3.0
    directory_timeout_s: float = 15.0  # one complete look-up or store
    heartbeat_s: float = 1.0  # of gossipsub: a new member receives nothing during its first heartbeat
    poll_s: float = 1.0  # of the connected peers
    check_s: float = 60.0  # rounds of dialing; also the renewal of this node's directory entry
    forward_s: float = 5.0  # period of a bootstrap node's search for runs to forward
    member_ttl_s: float = 300.0
    num_target_members: int = 8  # members to dial; more may dial this node
    # Between rounds of dialing while no member is connected.
    retry: ExponentialBackoff = field(default_factory=ExponentialBackoff)
    # Of lost members.
    redial: ExponentialBackoff = field(default_factory=lambda: ExponentialBackoff(first_s=2.0, ceiling_s=15.0))
    # Of the network process.
    restart: ExponentialBackoff = field(default_factory=lambda: ExponentialBackoff(first_s=0.5, ceiling_s=30.0))

    def __post_init__(self) -> None:
        _ = self.listen_addresses, self.peer_addresses  # raise for an invalid address
        for address in self.announce:
            check_announced_address(address)

    @property
    def listen_addresses(self) -> tuple[Address, ...]:
        return tuple(parse_listen_address(text) for text in self.listen)

    @property
    def peer_addresses(self) -> tuple[PeerAddress, ...]:
        """Return `peers` parsed, IPv4 first, because most home networks are reachable by IPv4."""
        return tuple(sorted(map(parse_multiaddr, self.peers), key=lambda peer: not peer.text.startswith("/ip4/")))
