"""One peer: who it is, how it stands and why, and its newest groups here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual import on
from textual.containers import VerticalScroll
from textual.widgets import DataTable

from ftis_node.dashboard.screens.group import GroupScreen
from ftis_node.dashboard.screens.page import Page
from ftis_node.dashboard.view.groups import GROUP_COLUMNS, group_row
from ftis_node.dashboard.view.peers import ban_words, peer_lines
from ftis_node.dashboard.view.spans import Span, Tone, line, sanitized
from ftis_node.dashboard.widgets.keys_line import KeysLine
from ftis_node.dashboard.widgets.rows_table import RowsTable
from ftis_node.dashboard.widgets.text_lines import TextLines

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from ftis_node.dashboard.messages import GroupsListed
    from ftis_node.dashboard.snapshot import NodeSnapshot


class PeerScreen(Page):
    """Stays up to date while it is open."""

    DEFAULT_CSS = """
    PeerScreen VerticalScroll { height: auto; max-height: 80%; }
    PeerScreen TextLines { margin: 0 0 1 0; }
    PeerScreen RowsTable { border-top: solid $foreground 40%; }
    """

    def __init__(self, peer_id: str) -> None:
        super().__init__()
        self.peer_id = peer_id

    def compose(self) -> ComposeResult:
        """MetricsPanel above, groups below; what is long scrolls in its own part."""
        with VerticalScroll():
            yield TextLines(id="peer", wraps=True)
        yield RowsTable(GROUP_COLUMNS, id="groups")
        yield KeysLine(("Enter", "open group"), ("Esc", "back"), ("q", "quit"))

    def on_mount(self) -> None:
        """The peer as last read, and its groups when they are found."""
        table = self.query_one(RowsTable)
        table.border_title = "reading the buffer"
        table.focus()
        if self.app.snapshot is not None:
            self.show(self.app.snapshot)
        self.app.load_groups(self, sender=self.peer_id)

    def show(self, snapshot: NodeSnapshot) -> None:
        """Writes the peer's row of a snapshot."""
        row = next((row for row in snapshot.peers if row["peer_id"] == self.peer_id), None)
        if row is None:
            self.query_one("#peer", TextLines).write([line(Span("this peer is no longer known", Tone.WARN))])
            return
        lines = peer_lines(row, now=snapshot.taken_at)
        self.query_one("#peer", TextLines).write([*lines, line(), line(Span(ban_words(row), Tone.FAINT))])

    def on_groups_listed(self, message: GroupsListed) -> None:
        """The groups were found, or why there are none."""
        table = self.query_one(RowsTable)
        table.border_title = sanitized(message.problem) or "its newest groups in the buffer"
        table.show_rows({group.id: group_row(group, self.app.peer_names()) for group in message.groups})

    @on(DataTable.RowSelected)
    def open_group(self, event: DataTable.RowSelected) -> None:
        """Enter on a group."""
        if event.row_key.value is not None:
            self.app.open_page(GroupScreen(event.row_key.value))
