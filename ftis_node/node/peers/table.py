"""The peer table that `peers --json`, the HTTP API and the home's status file show: activity and reputation by peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftis_node.node.peers.registry import PeerActivity
from ftis_node.swarm.peer_guard import Place

if TYPE_CHECKING:
    from ftis_node.node.peers.manager import PeerManager
    from ftis_node.node.peers.registry import PeerRegistry
    from ftis_node.swarm.peer_guard import PeerGuard


class PeerTable:
    """Joins the registry with the reputations."""

    def __init__(self, *, registry: PeerRegistry, peers: PeerManager, guard: PeerGuard) -> None:
        self._registry = registry
        self._peers = peers
        self._guard = guard

    def rows(self) -> list[dict[str, Any]]:
        """Return one row a peer; a row that raises is left out and charged to its peer."""
        met = dict(self._registry.peers)
        rows = []
        for peer_id in [*met, *(peer_id for peer_id in self._peers.known() if peer_id not in met)]:
            with self._guard.work_for(peer_id, Place.STATUS):
                activity = met.get(peer_id, PeerActivity())
                rows.append({"peer_id": peer_id, **activity.as_dict(), **self._peers.row(peer_id)})
        return rows
