"""The network of a node: announcements, envelopes, confirmations, the directory. Only this package imports hivemind.

These exports do not import hivemind. The files `libp2p` and `bootstrap_node` do: import them only to start a network.
"""

from __future__ import annotations

from ftis_node.gossip.interface import Gossip
from ftis_node.gossip.multiaddr import parse_listen_address, parse_multiaddr
from ftis_node.gossip.settings import NetworkSettings
from ftis_node.gossip.types import (
    MAX_ANSWERS,
    Fetched,
    FetchOutcome,
    GossipCounters,
    GossipLimits,
    GossipMessage,
    PeerConnection,
    SwarmPhase,
    SwarmState,
)

__all__ = [
    "MAX_ANSWERS",
    "FetchOutcome",
    "Fetched",
    "Gossip",
    "GossipCounters",
    "GossipLimits",
    "GossipMessage",
    "NetworkSettings",
    "PeerConnection",
    "SwarmPhase",
    "SwarmState",
    "parse_listen_address",
    "parse_multiaddr",
]
