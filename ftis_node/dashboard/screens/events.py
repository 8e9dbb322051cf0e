"""Screen of the event log: its last lines, optionally with routine events, searched, or newest first."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Input

from ftis_node.dashboard.context import TextPage
from ftis_node.dashboard.widgets import Scroller, SearchLine
from ftis_node.view.events import event_line, notable_events
from ftis_node.view.snapshot import NodeSnapshot
from ftis_node.view.spans import Span, Tone, line, text_of


class EventsScreen(TextPage):
    """Screen that follows the end of the event log; `a` shows all lines, `s` the newest first, `/` searches."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("a", "toggle_all", "all lines"),
        ("slash", "search", "search"),
        ("s", "turn", "newest first or last"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._shows_all = self._is_turned = False
        self._search_text = ""

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield SearchLine(back_to="Scroller")

    def on_mount(self) -> None:
        if self.app.snapshot is not None:
            self.show(self.app.snapshot)

    def show(self, snapshot: NodeSnapshot) -> None:
        """Show the events of a snapshot. A view at the end of the log stays at the end."""
        scroll = self.query_one(Scroller)
        was_at_end = scroll.is_vertical_scroll_end
        events = snapshot.history.events
        lines = [event_line(event) for event in (events if self._shows_all else notable_events(events))]
        if self._search_text:
            lines = [one for one in lines if self._search_text.casefold() in text_of(one).casefold()]
        if self._is_turned:
            lines.reverse()
        none = "no event has this text" if self._search_text else "no events yet"
        self.write(lines or [line(Span(none, Tone.FAINT))])
        if was_at_end and not self._is_turned:
            scroll.scroll_end(animate=False)

    def action_toggle_all(self) -> None:
        self._shows_all = not self._shows_all
        self._again()

    def action_turn(self) -> None:
        self._is_turned = not self._is_turned
        self._again()

    def action_search(self) -> None:
        self.query_one(SearchLine).open()

    @on(Input.Changed, "#search")
    def search(self, event: Input.Changed) -> None:
        self._search_text = event.value
        self._again()

    def _again(self) -> None:
        if self.app.snapshot is None:
            return
        self.show(self.app.snapshot)
        scroll = self.query_one(Scroller)
        (scroll.scroll_home if self._is_turned else scroll.scroll_end)(animate=False)
