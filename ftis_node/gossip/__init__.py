"""The network of a node: announcements, group bodies, confirmations, the directory. Only this package imports hivemind.

These exports do not import hivemind. `ftis_node.gossip.libp2p.Libp2pGossip` and
`ftis_node.gossip.bootstrap.BootstrapNode` do: import them only in code that starts a network.
"""

from __future__ import annotations

from ftis_node.gossip.interface import (
    Fetched,
    FetchOutcome,
    Gossip,
    GossipCounters,
    GossipLimits,
    GossipMessage,
    PeerConnection,
    SwarmPhase,
    SwarmState,
)
from ftis_node.gossip.multiaddr import PeerAddress, parse_listen_address, parse_multiaddr
from ftis_node.gossip.settings import NetworkSettings

__all__ = [
    "GossipMessage",
    "FetchOutcome",
    "Fetched",
    "Gossip",
    "GossipCounters",
    "GossipLimits",
    "NetworkSettings",
    "PeerAddress",
    "PeerConnection",
    "SwarmPhase",
    "SwarmState",
    "parse_listen_address",
    "parse_multiaddr",
]
