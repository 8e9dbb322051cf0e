"""The last lines of the event trail that are worth a look, as many as there is room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.dashboard.view.events import event_line, notable_events
from ftis_node.dashboard.widgets.text_lines import TextLines

if TYPE_CHECKING:
    from ftis_node.dashboard.snapshot import NodeSnapshot


class EventLines(TextLines):
    """The newest at the bottom."""

    DEFAULT_CSS = "EventLines { height: 1fr; border-top: solid $foreground 40%; }"

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.border_title = "events"
        self._reading: NodeSnapshot | None = None

    def show(self, snapshot: NodeSnapshot) -> None:
        """The newest events."""
        self._reading = snapshot
        num_rows = max(1, self.content_size.height)
        self.write(event_line(event) for event in notable_events(snapshot.history.events)[-num_rows:])

    def on_resize(self) -> None:
        """There is room for another number of them."""
        if self._reading is not None:
            self.show(self._reading)
