"""Newest notable lines of the event log, as many as the widget has lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.dashboard.view.events import event_line, notable_events
from ftis_node.dashboard.widgets.text_lines import TextLines

if TYPE_CHECKING:
    from ftis_node.dashboard.snapshot import NodeSnapshot


class EventLines(TextLines):
    """Lines of events, the newest at the bottom."""

    DEFAULT_CSS = "EventLines { height: 1fr; border-top: solid $foreground 40%; }"

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.border_title = "events"
        self._reading: NodeSnapshot | None = None

    def show(self, snapshot: NodeSnapshot) -> None:
        self._reading = snapshot
        num_rows = max(1, self.content_size.height)
        self.write(event_line(event) for event in notable_events(snapshot.history.events)[-num_rows:])

    def on_resize(self) -> None:
        if self._reading is not None:
            self.show(self._reading)
