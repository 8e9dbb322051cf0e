"""Tries given addresses out, one by one, with a p2pd and an identity made for that: what `doctor` says of peers.

p2pd itself would hide a dead address behind a living one of the same peer, so each is dialled alone.
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
    """What came of dialling one address. `error` is empty where it was reached.

    `clock_skew_s`: its clock less ours. `is_in_directory`: it answered there, so members can be found through it.
    """

    address: str
    error: str = ""
    dial_s: float = 0.0
    is_in_directory: bool = False
    clock_skew_s: float | None = None
    relay_limit: RelayLimit | None = None


@dataclass(frozen=True, slots=True)
class NetworkProbe:
    """Each given address tried out, and how this machine can be dialled by what it knows of itself."""

    addresses: tuple[AddressProbe, ...]
    reachability: Reachability


async def probe_network(peers: tuple[PeerAddress, ...], *, listen: tuple[str, ...], sockets_dir: Path) -> NetworkProbe:
    """Dials each address in turn. Raises UsageError and MachineError where not even our own p2pd starts."""
    probes = []
    reachability = Reachability.UNKNOWN
    for peer in peers:  # a p2pd each: the connection by one address would pass for one by the next
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
