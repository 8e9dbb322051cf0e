"""The swarm section of the status: network state, peers, traffic and refusals."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ftis_node.telemetry.status import SwarmStatus

if TYPE_CHECKING:
    from collections.abc import Collection

    from ftis_node.gossip.interface import Gossip
    from ftis_node.node.peers.confirmations import Confirmations
    from ftis_node.node.peers.registry import PeerRegistry
    from ftis_node.node.state import NodeCounters


class SwarmReporter:
    """Builds the section from the network and the counters. The status and the trackers use it."""

    def __init__(
        self, *, gossip: Gossip, registry: PeerRegistry, counters: NodeCounters, confirmations: Confirmations
    ) -> None:
        self._gossip = gossip
        self._registry = registry
        self._counters = counters
        self._confirmations = confirmations

    def status(self, *, members: Collection[str]) -> SwarmStatus:
        """Return the section. `members` are the connected members of the run."""
        counters, gossip = self._counters, self._gossip
        others = self._registry.other_versions(members)
        tokens = counters.tokens_received
        return SwarmStatus(
            state=str(gossip.state.state),
            reason=gossip.state.reason,
            reachability=str(gossip.reachability),
            clock_skew_s=None if gossip.clock_skew_s is None else round(gossip.clock_skew_s, 3),
            peers_known=len(self._registry.peers),
            peers_connected=len(members),
            groups_sent=counters.groups_sent,
            groups_confirmed=self._confirmations.num_confirmed,
            groups_received=counters.groups_received,
            groups_refused=dict(counters.refused),
            groups_repaired=counters.groups_repaired,
            bytes_in=gossip.counters.body_bytes_in,
            bytes_out=gossip.counters.body_bytes_out,
            tokens_in=tokens,
            bytes_per_token=round(counters.envelope_bytes_received / tokens, 3) if tokens else None,
            fetch_errors=dict(gossip.counters.fetch_errors),
            serve_errors=dict(gossip.counters.serve_errors),
            announcements_refused=gossip.counters.announcements_refused,
            confirmations_unproven=counters.confirmations_unproven,
            non_ed25519=dict(gossip.counters.non_ed25519),
            weights_bytes_in=gossip.counters.weights_bytes_in,
            weights_bytes_out=gossip.counters.weights_bytes_out,
            weights_age_s=None
            if counters.weights_created_at is None
            else round(time.time() - counters.weights_created_at, 3),
            weights_refused=dict(counters.weights_refused),
            announcements_dropped=gossip.counters.announcements_dropped,
            records_refused=gossip.counters.records_refused,
            peers_newer=others.num_newer,
            peers_older=others.num_older,
            update=others.advice,
        )
