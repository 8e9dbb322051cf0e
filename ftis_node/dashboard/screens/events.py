"""Screen of the event log: its last lines, on request also the routine ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.containers import VerticalScroll

from ftis_node.dashboard.screens.page import Page
from ftis_node.dashboard.view.events import event_line, notable_events
from ftis_node.dashboard.view.spans import Span, Tone, line
from ftis_node.dashboard.widgets.keys_line import KeysLine
from ftis_node.dashboard.widgets.text_lines import TextLines

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from ftis_node.dashboard.snapshot import NodeSnapshot


class EventsScreen(Page):
    """Screen that follows the end of the event log; `a` shows all lines."""

    BINDINGS: ClassVar[list[BindingType]] = [("a", "toggle_all", "all lines")]

    def __init__(self) -> None:
        super().__init__()
        self._shows_all = False

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="scroll"):
            yield TextLines(id="trail", wraps=True)
        yield KeysLine(("arrows", "scroll"), ("a", "all lines"), ("Esc", "back"), ("q", "quit"))

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()
        if self.app.snapshot is not None:
            self.show(self.app.snapshot)

    def show(self, snapshot: NodeSnapshot) -> None:
        """Show the events of a snapshot; a view that is at the end stays there."""
        scroll = self.query_one(VerticalScroll)
        was_at_end = scroll.is_vertical_scroll_end
        events = snapshot.history.events
        lines = [event_line(event) for event in (events if self._shows_all else notable_events(events))]
        self.query_one("#trail", TextLines).write(lines or [line(Span("no events yet", Tone.FAINT))])
        if was_at_end:
            scroll.scroll_end(animate=False)

    def action_toggle_all(self) -> None:
        """Switch between all lines and the notable ones."""
        self._shows_all = not self._shows_all
        if self.app.snapshot is not None:
            self.show(self.app.snapshot)
            self.query_one(VerticalScroll).scroll_end(animate=False)
