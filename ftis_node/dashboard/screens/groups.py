"""Screen of the newest groups in the buffer, own and foreign; Enter opens one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.widgets import DataTable

from ftis_node.dashboard.screens.group import GroupScreen
from ftis_node.dashboard.screens.page import Page
from ftis_node.dashboard.view.groups import GROUP_COLUMNS, group_row
from ftis_node.dashboard.view.spans import sanitized
from ftis_node.dashboard.widgets.keys_line import KeysLine
from ftis_node.dashboard.widgets.rows_table import RowsTable

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from ftis_node.dashboard.messages import GroupsListed


class GroupsScreen(Page):
    """Screen with a list of groups that changes only when `r` reloads it."""

    BINDINGS: ClassVar[list[BindingType]] = [("r", "reload", "reload")]

    def compose(self) -> ComposeResult:
        yield RowsTable(GROUP_COLUMNS, id="groups")
        yield KeysLine(("Enter", "open group"), ("r", "reload"), ("Esc", "back"), ("q", "quit"))

    def on_mount(self) -> None:
        """Request the groups."""
        table = self.query_one(RowsTable)
        table.styles.border_top = ("solid", "gray")
        table.border_title = "reading the buffer"
        table.focus()
        self.action_reload()

    def action_reload(self) -> None:
        """Read the buffer again."""
        self.app.load_groups(self)

    def on_groups_listed(self, message: GroupsListed) -> None:
        table = self.query_one(RowsTable)
        table.border_title = sanitized(message.problem) or f"the newest {len(message.groups)} groups of the buffer"
        table.show_rows({group.id: group_row(group, self.app.peer_names()) for group in message.groups})

    @on(DataTable.RowSelected)
    def open_group(self, event: DataTable.RowSelected) -> None:
        if event.row_key.value is not None:
            self.app.open_page(GroupScreen(event.row_key.value))
