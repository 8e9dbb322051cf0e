"""Screen of one peer: its values, its reputation and the reasons, its newest groups in the buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual import on
from textual.widgets import DataTable

from ftis_node.dashboard.context import Page
from ftis_node.dashboard.screens.groups import GroupScreen
from ftis_node.dashboard.view.groups import GROUP_COLUMNS, group_row
from ftis_node.dashboard.view.peers import ban_words, peer_lines
from ftis_node.dashboard.view.spans import Span, Tone, line, sanitized
from ftis_node.dashboard.widgets.rows_table import RowsTable
from ftis_node.dashboard.widgets.text_lines import KeysLine, Scroller, TextLines

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from ftis_node.dashboard.context import GroupsListed
    from ftis_node.dashboard.snapshot import NodeSnapshot


class PeerScreen(Page):
    """Screen of one peer, updated while it is open."""

    DEFAULT_CSS = """
    PeerScreen Scroller { height: auto; max-height: 80%; }
    PeerScreen TextLines { margin: 0 0 1 0; }
    PeerScreen RowsTable { border-top: solid $foreground 40%; }
    """

    def __init__(self, peer_id: str) -> None:
        super().__init__()
        self.peer_id = peer_id

    def compose(self) -> ComposeResult:
        """Lay out the peer's values above its groups; each part scrolls."""
        with Scroller():
            yield TextLines(id="peer", wraps=True)
        yield RowsTable(GROUP_COLUMNS, id="groups")
        yield KeysLine(("Enter", "open group"), ("Esc", "back"), ("q", "quit"))

    def on_mount(self) -> None:
        """Show the last snapshot and request the peer's groups."""
        table = self.query_one(RowsTable)
        table.border_title = "reading the buffer"
        table.focus()
        if self.app.snapshot is not None:
            self.show(self.app.snapshot)
        self.app.load_groups(self, sender=self.peer_id)

    def show(self, snapshot: NodeSnapshot) -> None:
        """Show the peer as it is in a snapshot."""
        row = next((row for row in snapshot.peers if row["peer_id"] == self.peer_id), None)
        if row is None:
            self.query_one("#peer", TextLines).write([line(Span("this node no longer knows this peer", Tone.WARN))])
            return
        lines = peer_lines(row, now=snapshot.taken_at)
        self.query_one("#peer", TextLines).write([*lines, line(), line(Span(ban_words(row), Tone.FAINT))])

    def on_groups_listed(self, message: GroupsListed) -> None:
        table = self.query_one(RowsTable)
        table.border_title = sanitized(message.problem) or "its newest groups in the buffer"
        table.show_rows({group.id: group_row(group, self.app.peer_names()) for group in message.groups})

    @on(DataTable.RowSelected)
    def open_group(self, event: DataTable.RowSelected) -> None:
        if event.row_key.value is not None:
            self.app.open_page(GroupScreen(event.row_key.value))
