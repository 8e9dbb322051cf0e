"""The base of a node's loops and of its components about peers. It lies here because these components use it."""

from __future__ import annotations

from dataclasses import dataclass

from ftis_node.gossip import Gossip
from ftis_node.node.context import NodeContext
from ftis_node.node.peers.peer_manager import PeerManager
from ftis_node.node.storage.node_store import Store


@dataclass(eq=False, repr=False)
class NodePart:
    """Base class with the four parts of a node that nearly every loop uses. A subclass adds what it needs beside them.

    `wiring.py` passes them in this order.
    """

    context: NodeContext
    store: Store
    gossip: Gossip
    peers: PeerManager
