"""Tests addresses one by one with a temporary p2pd and identity. `doctor` shows the results.

Each address gets a separate p2pd, because p2pd would hide a dead address behind a working one of the same peer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.gossip.membership.reachability import Reachability, reachability_of
from ftis_node.gossip.p2pd.client import P2pdError
from ftis_node.gossip.p2pd.relay_limit import fetch_limit
from ftis_node.gossip.p2pd.session import client_only_config, open_session
from ftis_node.gossip.settings import NetworkSettings

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.gossip.multiaddr import PeerAddress
    from ftis_node.gossip.p2pd.relay_limit import RelayLimit
    from ftis_node.gossip.p2pd.session import Session

PROBE_TIMEOUT_S = 8.0


@dataclass(frozen=True, slots=True)
class AddressProbe:
    """Result of dialing one address. `error` is empty if the dial succeeded.

    `clock_skew_s` is the peer's clock minus ours. `is_in_directory` is true if the peer answers directory queries, so
    that members can be found through it.
    """

    address: str
    error: str = ""
    dial_s: float = 0.0
    is_in_directory: bool = False
    clock_skew_s: float | None = None
    relay_limit: RelayLimit | None = None


@dataclass(frozen=True, slots=True)
class NetworkProbe:
    """Results for all tested addresses, and this machine's reachability according to its own addresses."""

    addresses: tuple[AddressProbe, ...]
    reachability: Reachability


async def probe_network(peers: tuple[PeerAddress, ...], *, listen: tuple[str, ...], sockets_dir: Path) -> NetworkProbe:
    """Dial each address in turn. Raises UsageError and MachineError if our own p2pd does not start."""
    probes = []
    reachability = Reachability.UNKNOWN
    for peer in peers:  # one p2pd for each address: an open connection would hide the next address
        settings = NetworkSettings(sockets_dir=sockets_dir, listen=listen, use_nat_helpers=False, stop_timeout_s=0.5)
        async with open_session(client_only_config(settings), listen=settings.listen_addresses) as session:
            reachability = reachability_of(session.listening_on)
            probes.append(await _probe(session, peer))
    return NetworkProbe(tuple(probes), reachability)


async def _probe(session: Session, peer: PeerAddress) -> AddressProbe:
    began_at = time.monotonic()
    try:
        await session.client.connect(peer.peer_id, [peer.transport], timeout_s=PROBE_TIMEOUT_S)
    except P2pdError as error:
        return AddressProbe(peer.text, error=str(error))
    dial_s = time.monotonic() - began_at
    try:
        is_in_directory = await session.directory.join([peer.peer_id]) > 0
    except TimeoutError:
        is_in_directory = False
    return AddressProbe(
        peer.text,
        dial_s=dial_s,
        is_in_directory=is_in_directory,
        clock_skew_s=session.directory.clock_skew_s,
        relay_limit=await fetch_limit(session.client, peer.peer_id, timeout_s=PROBE_TIMEOUT_S),
    )
