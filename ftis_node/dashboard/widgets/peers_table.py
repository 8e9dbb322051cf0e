from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.dashboard.view.peers import PEER_COLUMNS, peer_row, sorted_peers
from ftis_node.dashboard.widgets.rows_table import RowsTable

if TYPE_CHECKING:
    from ftis_node.dashboard.snapshot import NodeSnapshot

MAX_ROWS = 500


class PeersTable(RowsTable):
    """Table of peers, those with most accepted groups first."""

    DEFAULT_CSS = "PeersTable { border-top: solid $foreground 40%; }"

    def __init__(self, *, id: str) -> None:
        super().__init__(PEER_COLUMNS, id=id)
        self.border_title = "peers"

    def show(self, snapshot: NodeSnapshot) -> None:
        swarm = snapshot.status.swarm
        self.border_title = f"peers: {swarm.peers_connected} connected, {len(snapshot.peers)} known"
        shown = sorted_peers(snapshot.peers)[:MAX_ROWS]
        self.show_rows({row["peer_id"]: peer_row(row, now=snapshot.taken_at) for row in shown})
