"""How one node takes part in the network: where it listens, whom it knows, how patient it is."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from ftis_node.gossip.multiaddr import check_announced_address, parse_listen_address, parse_multiaddr
from ftis_node.swarm.backoff import ExponentialBackoff

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.gossip.multiaddr import ListenAddress, PeerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """Settings of the network process and of the loop that keeps it connected. Raises ConfigError for a bad address.

    `sockets_dir` is this node's alone; it is made where it is missing and emptied at each start.
    """

    sockets_dir: Path
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()  # told to others instead of what is found; without /p2p/ID
    peers: tuple[str, ...] = ()  # dialled first: bootstrap nodes, or any member
    use_nat_helpers: bool = True  # port mapping, reachability checks, hole punching, a relay where we are not reachable
    is_unreachable: bool = False  # nobody can dial us: take a relay at once instead of finding that out
    start_timeout_s: float = 30.0
    num_start_tries: int = 2
    stop_timeout_s: float = 2.0
    num_relay_tries: int = 20  # starts of a bootstrap node until the relay service with the limits below answers
    relay_bytes: int = 1 << 32  # passed on for one connection each way, then it is cut; of a bootstrap node
    relay_connections_per_peer: int = 64
    relay_reservations: int = 1024  # peers that can be reached through a bootstrap node
    control_timeout_s: float = 20.0  # p2pd's own answers
    dial_timeout_s: float = 10.0
    directory_rpc_timeout_s: float = 3.0
    directory_timeout_s: float = 15.0  # one whole look-up or store
    heartbeat_s: float = 1.0  # of gossipsub: a new member misses what is announced in its first one
    poll_s: float = 1.0  # who is there
    check_s: float = 60.0  # are there enough members, do the given peers still answer; also the renewal of our entry
    forward_s: float = 5.0  # a bootstrap node looks for runs whose announcements it passes on
    member_ttl_s: float = 300.0
    num_members_wanted: int = 8  # dialled up to; others may dial us beyond it
    retry: ExponentialBackoff = field(default_factory=ExponentialBackoff)  # between rounds of dialling while alone
    redial: ExponentialBackoff = field(
        default_factory=lambda: ExponentialBackoff(first_s=2.0, ceiling_s=15.0)
    )  # of members that were lost
    redial_for_s: float = 900.0
    restart: ExponentialBackoff = field(
        default_factory=lambda: ExponentialBackoff(first_s=0.5, ceiling_s=30.0)
    )  # of the network process

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
                raise ValueError(f"{entry.name} must be above 0")
        if not self.listen:
            raise ValueError("a node listens on at least one address")
        _ = self.listen_addresses, self.peer_addresses
        for address in self.announce:
            check_announced_address(address)

    @property
    def listen_addresses(self) -> tuple[ListenAddress, ...]:
        """`listen`, parsed."""
        return tuple(parse_listen_address(text) for text in self.listen)

    @property
    def peer_addresses(self) -> tuple[PeerAddress, ...]:
        """`peers`, parsed; IPv4 before the rest, which is where most homes are reachable."""
        return tuple(sorted(map(parse_multiaddr, self.peers), key=lambda peer: not peer.text.startswith("/ip4/")))
