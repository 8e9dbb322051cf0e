"""Screens of groups: the newest in the buffer, own and peers'; and one with its completions, log-probs and rewards."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import DataTable

from ftis_node.dashboard.context import Loaded, Page, TextPage
from ftis_node.dashboard.widgets import Keys, RowsTable, Scroller, TextLines
from ftis_node.view.groups import GROUP_COLUMNS, group_lines, group_row
from ftis_node.view.peers import ban_words, peer_lines
from ftis_node.view.snapshot import NodeSnapshot
from ftis_node.view.spans import Span, Tone, line

if TYPE_CHECKING:
    from ftis_node.replay.group_history import GroupHistory
    from ftis_node.replay.reader import GroupSummary

NUM_LISTED = 200


class GroupsScreen(Page):
    """Screen with a list of groups that changes only when `r` reloads it."""

    AUTO_FOCUS = "RowsTable"
    DEFAULT_CSS = "GroupsScreen RowsTable { border-top: solid $foreground 40%; }"
    BINDINGS: ClassVar[list[BindingType]] = [("r", "reload", "reload")]
    sender: str | None = None

    def compose(self) -> ComposeResult:
        yield RowsTable(GROUP_COLUMNS, id="groups")
        yield Keys()

    def on_mount(self) -> None:
        self.query_one(RowsTable).border_title = "reading the buffer"
        self.action_reload()

    def action_reload(self) -> None:
        self.load(self.read)

    def read(self) -> list[GroupSummary]:
        from ftis_node.replay.reader import ReplayReader

        with closing(ReplayReader(self.app.home.replay)) as reader:
            if self.sender is None:
                return reader.list_groups(limit=NUM_LISTED)
            return reader.groups_of(self.sender, limit=NUM_LISTED).newest

    def on_loaded(self, message: Loaded) -> None:
        groups: list[GroupSummary] = message.value or []
        found = "its newest groups in the buffer" if self.sender else f"the newest {len(groups)} groups of the buffer"
        table = self.query_one(RowsTable)
        table.border_title = message.problem or found
        table.show_rows({group.id: group_row(group, self.app.peer_names()) for group in groups})

    @on(DataTable.RowSelected)
    def open_group(self, event: DataTable.RowSelected) -> None:
        if event.row_key.value is not None:
            self.app.open_page(GroupScreen(event.row_key.value))


class GroupScreen(TextPage):
    BINDINGS: ClassVar[list[BindingType]] = [("l", "toggle_tokens", "log-probs of all tokens")]

    def __init__(self, group_id: str) -> None:
        super().__init__()
        self._group_id = group_id
        self._group: GroupHistory | None = None
        self._with_tokens = False

    def on_mount(self) -> None:
        self.write([line(Span(f"reading group {self._group_id}", Tone.FAINT))])
        self.load(self.read)

    def read(self) -> GroupHistory | None:
        return self.app.read_group(self._group_id)

    def on_loaded(self, message: Loaded) -> None:
        self._group = message.value
        if self._group is None:
            words = message.problem or "the buffer no longer has this group: newer ones replaced it"
            self.write([line(Span(words, Tone.WARN))])
        else:
            self._show()

    def action_toggle_tokens(self) -> None:
        self._with_tokens = not self._with_tokens
        self._show()

    def _show(self) -> None:
        if self._group is not None:
            self.write(group_lines(self._group, with_tokens=self._with_tokens))


class PeerScreen(GroupsScreen):
    """Screen of one peer, updated while it is open."""

    DEFAULT_CSS = """
    PeerScreen Scroller { height: auto; max-height: 80%; }
    PeerScreen TextLines { margin: 0 0 1 0; }
    """

    def __init__(self, peer_id: str) -> None:
        super().__init__()
        self.sender = peer_id

    def compose(self) -> ComposeResult:
        with Scroller():
            yield TextLines(id="peer", wraps=True)
        yield from super().compose()

    def on_mount(self) -> None:
        """Show the last snapshot. Textual calls the handler of the base class, too, which requests the groups."""
        if self.app.snapshot is not None:
            self.show(self.app.snapshot)

    def show(self, snapshot: NodeSnapshot) -> None:
        row = next((row for row in snapshot.peers if row["peer_id"] == self.sender), None)
        if row is None:
            lines = [line(Span("this node no longer knows this peer", Tone.WARN))]
        else:
            lines = [*peer_lines(row, now=snapshot.taken_at), line(), line(Span(ban_words(row), Tone.FAINT))]
        self.query_one("#peer", TextLines).write(lines)
