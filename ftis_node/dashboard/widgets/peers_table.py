"""The peers, who gave most first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.dashboard.view.peers import PEER_COLUMNS, peer_row, sorted_peers
from ftis_node.dashboard.widgets.rows_table import RowsTable

if TYPE_CHECKING:
    from ftis_node.dashboard.snapshot import Reading

MAX_ROWS = 500


class PeersTable(RowsTable):
    """One row a peer."""

    DEFAULT_CSS = "PeersTable { border-top: solid $foreground 40%; }"

    def __init__(self, *, id: str) -> None:
        super().__init__(PEER_COLUMNS, id=id)
        self.border_title = "peers"

    def show(self, reading: Reading) -> None:
        """The peers as they were found."""
        swarm = reading.status.swarm
        self.border_title = f"peers: {swarm.peers_connected} connected, {len(reading.peers)} known"
        shown = sorted_peers(reading.peers)[:MAX_ROWS]
        self.show_rows({row["peer_id"]: peer_row(row, now=reading.taken_at) for row in shown})
