"""Screen of the whole swarm: totals, a row for each node, who learns from whom; updated regularly."""

from __future__ import annotations

import time
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import DataTable

from ftis_node.dashboard.context import Loaded, Page, TextPage
from ftis_node.dashboard.widgets import Keys, RowsTable, Scroller, TextLines
from ftis_node.swarm.overview import SwarmView
from ftis_node.view.spans import Span, Tone, line
from ftis_node.view.swarm import (
    SWARM_COLUMNS,
    SWARM_ORDERS,
    learning_lines,
    names_of,
    node_lines,
    node_row,
    sorted_nodes,
    title_lines,
)

PERIOD_S = 5.0


class SwarmScreen(Page):
    """Screen of one run; of several runs, as a bootstrap node has, `n` shows the next."""

    AUTO_FOCUS = "RowsTable"
    DEFAULT_CSS = """
    SwarmScreen RowsTable { height: auto; max-height: 60%; border-top: solid $foreground 40%; }
    SwarmScreen Scroller { height: 1fr; border-top: solid $foreground 40%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [("s", "sort", "sort"), ("n", "next_run", "next run")]

    def __init__(self) -> None:
        super().__init__()
        self._views: list[SwarmView] = []
        self._place = 0
        self._order: str | None = None

    def compose(self) -> ComposeResult:
        yield TextLines(id="text", wraps=True)
        yield RowsTable(SWARM_COLUMNS, id="nodes", is_dense=True)
        with Scroller():
            yield TextLines(id="learning", wraps=True)
        yield Keys()

    def on_mount(self) -> None:
        self.query_one("#text", TextLines).write([line("reading the swarm ...")])
        self.call_after_refresh(self.load, self.read)

    def on_loaded(self, message: Loaded) -> None:
        self._views = message.value or []
        self.refresh_bindings()
        if message.value:
            self._show()
        else:
            self.query_one("#text", TextLines).write([line(message.problem or "no run is known yet")])
        self.set_timer(PERIOD_S, lambda: self.load(self.read))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        return action != "next_run" or len(self._views) > 1

    def read(self) -> list[SwarmView]:
        from ftis_node.node.http_api.node_client import read_document

        return [SwarmView.from_dict(one) for one in read_document(self.app.home, "/swarm")]

    def _show(self) -> None:
        self._place %= max(1, len(self._views))
        view, now = self._views[self._place], time.time()
        lines = title_lines(view, now=now)
        if len(self._views) > 1:
            lines.append(line(Span(f"run {self._place + 1} of {len(self._views)}", Tone.FAINT)))
        self.query_one("#text", TextLines).write(lines)
        self.query_one("#learning", TextLines).write(learning_lines(view))
        table, names = self.query_one(RowsTable), names_of(view)
        table.border_title = f"nodes, by {self._order}" if self._order else "nodes"
        rows = sorted_nodes(view, self._order)
        table.show_rows({row.peer_id: node_row(row, names, now=now, own_id=view.own_id) for row in rows})

    def action_sort(self) -> None:
        orders = [None, *SWARM_ORDERS]
        self._sort_by(orders[(orders.index(self._order) + 1) % len(orders)])

    def action_next_run(self) -> None:
        self._place += 1
        self._sort_by(self._order)

    @on(DataTable.HeaderSelected)
    def sort_by_column(self, event: DataTable.HeaderSelected) -> None:
        if event.column_key.value in SWARM_ORDERS:
            self._sort_by(event.column_key.value)

    def _sort_by(self, order: str | None) -> None:
        self._order = order
        if self._views:
            self._show()

    @on(DataTable.RowSelected)
    def open_node(self, event: DataTable.RowSelected) -> None:
        if self._views and event.row_key.value is not None:
            self.app.open_page(NodeScreen(self._views[self._place], event.row_key.value))


class NodeScreen(TextPage):
    """Screen of one node of the swarm, as of the time at which it was opened."""

    def __init__(self, view: SwarmView, peer_id: str) -> None:
        super().__init__()
        self._view, self._peer_id = view, peer_id

    def on_mount(self) -> None:
        (row,) = (row for row in self._view.peers if row.peer_id == self._peer_id)
        self.write(node_lines(row, self._view, now=time.time()))
