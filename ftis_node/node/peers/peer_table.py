"""The peer table that `peers --json`, the HTTP API and the home's status file show: activity and reputation by peer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ftis_node.node.peers.registry import PeerActivity
from ftis_node.swarm.overview.view import RunSummary, make_view, swarm_row
from ftis_node.swarm.peer_guard import Place

if TYPE_CHECKING:
    from ftis_node.config.manifest import RunManifest
    from ftis_node.node.peers.manager import PeerManager
    from ftis_node.node.peers.registry import PeerRegistry
    from ftis_node.swarm.overview.view import SwarmView
    from ftis_node.swarm.peer_guard import PeerGuard


class PeerTable:
    """Joins the registry with the reputations."""

    def __init__(self, *, registry: PeerRegistry, peers: PeerManager, guard: PeerGuard, manifest: RunManifest) -> None:
        self._registry = registry
        self._manifest = manifest
        self._peers = peers
        self._guard = guard

    def swarm(self) -> SwarmView:
        """Return the view of the swarm: this node first, then the peers that it saw last."""
        own, rows = self._registry.own_record, []
        if own is not None:
            rows.append(swarm_row(own, seen_at=time.time()))
        for peer_id, activity in dict(self._registry.peers).items():
            with self._guard.work_for(peer_id, Place.STATUS):
                if activity.record is not None:
                    rows.append(swarm_row(activity.record, seen_at=activity.last_seen))
        num_unreadable = sum(activity.record is None for activity in self._registry.peers.values())
        return make_view(
            rows,
            run=RunSummary.of(self._manifest),
            now=time.time(),
            own_id=own.peer_id if own else "",
            num_unreadable=num_unreadable,
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per peer. If a row raises an error, omit it and charge its peer."""
        met = dict(self._registry.peers)
        rows = []
        for peer_id in [*met, *(peer_id for peer_id in self._peers.known() if peer_id not in met)]:
            with self._guard.work_for(peer_id, Place.STATUS):
                activity = met.get(peer_id, PeerActivity())
                rows.append({"peer_id": peer_id, **activity.as_dict(), **self._peers.row(peer_id)})
        return rows
