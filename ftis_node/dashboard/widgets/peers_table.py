from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from ftis_node.dashboard.view.peers import ORDERS, PEER_COLUMNS, is_found, peer_row, sorted_peers
from ftis_node.dashboard.view.spans import sanitized
from ftis_node.dashboard.widgets.rows_table import RowsTable

if TYPE_CHECKING:
    from textual.widgets import DataTable

    from ftis_node.dashboard.snapshot import NodeSnapshot

MAX_ROWS = 500


class PeersTable(RowsTable):
    """Table of peers, those with the most accepted groups first unless another order is selected."""

    DEFAULT_CSS = "PeersTable { border-top: solid $foreground 40%; }"

    def __init__(self, *, id: str) -> None:
        super().__init__(PEER_COLUMNS, id=id, is_dense=True)
        self.border_title = "peers"
        self._order, self._wanted = "accepted", ""
        self._snapshot: NodeSnapshot | None = None

    def show(self, snapshot: NodeSnapshot) -> None:
        self._snapshot = snapshot
        swarm = snapshot.status.swarm
        found = [row for row in snapshot.peers if is_found(row, self._wanted)]
        order = "" if self._order == "accepted" else f", by {self._order}"
        search = f", {len(found)} with {sanitized(self._wanted)!r}" if self._wanted else ""
        self.border_title = Text(
            f"peers: {swarm.peers_connected} connected, {len(snapshot.peers)} known{order}{search}"
        )
        shown = sorted_peers(found, self._order)[:MAX_ROWS]
        self.show_rows({row["peer_id"]: peer_row(row, now=snapshot.taken_at) for row in shown})

    def search(self, text: str) -> None:
        """Show only the peers that contain the text; "" shows all."""
        self._wanted = text
        self._again()

    def sort_next(self) -> None:
        """Select the next order."""
        orders = list(ORDERS)
        self._order = orders[(orders.index(self._order) + 1) % len(orders)]
        self._again()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        if event.column_key.value in ORDERS:
            self._order = event.column_key.value
            self._again()

    def _again(self) -> None:
        if self._snapshot is not None:
            self.show(self._snapshot)
