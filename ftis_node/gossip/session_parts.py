"""What all p2pd sessions of one node share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ftis_node.gossip.encryption import NO_CIPHER, NullCipher
from ftis_node.gossip.services import AdmissionControl, Handler
from ftis_node.gossip.settings import NetworkSettings
from ftis_node.gossip.types import GossipCounters, GossipLimits
from ftis_node.records.identity import Identity
from ftis_node.swarm.peer_guard import PeerGuard


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParts:
    """Settings and shared parts of one node. The defaults are those of a node in no run, with a temporary identity.

    `handlers` are by protocol name. `is_public` is true for a bootstrap node. `on_duplicate_identity` is called when
    another node with this identity is detected.
    """

    settings: NetworkSettings
    identity: Identity = field(default_factory=Identity.generate)
    limits: GossipLimits = GossipLimits()
    counters: GossipCounters = field(default_factory=GossipCounters)
    handlers: Mapping[str, Handler] = field(default_factory=dict)
    admission: AdmissionControl = field(default_factory=lambda: AdmissionControl(GossipLimits()))
    cipher: NullCipher = NO_CIPHER
    is_public: bool = False
    guard: PeerGuard = field(default_factory=PeerGuard)
    on_duplicate_identity: Callable[[], None] = lambda: None
