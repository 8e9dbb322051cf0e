"""Panels of the main screen: the three answers, the metrics, the newest events, the plot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from textual.widgets import Static

from ftis_node.dashboard.view.events import event_line, notable_events
from ftis_node.dashboard.view.health_answers import answer_lines, next_lines, worst_tone
from ftis_node.dashboard.view.metric_lines import head_line, metric_lines
from ftis_node.dashboard.view.spans import Span, Tone, line, sanitized
from ftis_node.dashboard.view.terminal_plot import plot_rows
from ftis_node.dashboard.widgets.text_lines import TextLines

if TYPE_CHECKING:
    from ftis_node.dashboard.snapshot import NodeSnapshot
    from ftis_node.dashboard.view.terminal_plot import Points

BORDERS = {"-good": Tone.GOOD, "-waits": Tone.WARN, "-bad": Tone.BAD}
BRAILLE = "[\u2800-\u28ff]+"


class Overview(TextLines):
    """Four lines, five for a node that waits, six for a node that does not run. The border has the worst tone."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.border_title = "answers"

    def show(self, snapshot: NodeSnapshot) -> None:
        lines = [head_line(snapshot), *answer_lines(snapshot)]
        if snapshot.problem and not snapshot.is_live:
            lines.append(line(Span(sanitized(snapshot.problem), Tone.WARN)))
        lines += next_lines(snapshot)
        tone = worst_tone(snapshot)
        for name, border_tone in BORDERS.items():
            self.set_class(tone is border_tone, name)
        self.write(lines)


class MetricsPanel(TextLines):
    """Metric lines: workers, shares, groups, buffer, memory."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.border_title = "work"

    def show(self, snapshot: NodeSnapshot) -> None:
        self.write(metric_lines(snapshot))


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


class Plot(Static):
    """Plot under its title, redrawn when its points or its size change.

    The title is in the border and takes no row.
    """

    DEFAULT_CSS = """
    Plot { width: 1fr; height: 1fr; border-top: solid $foreground 40%; border-title-style: bold; padding: 0 1 0 0; }
    Plot.-stopped { text-style: dim; }
    """

    def __init__(self, title: str, *, id: str) -> None:
        super().__init__(id=id)
        self.border_title = title
        self._points: Points = ()
        self._is_loaded = False

    def show(self, title: str, points: Points, *, is_live: bool) -> None:
        """Replace the points."""
        self._is_loaded = True
        self.border_title = Text(title)
        self.set_class(not is_live, "-stopped")
        if points != self._points:
            self._points = points
            self._draw()

    def on_resize(self) -> None:
        if self._is_loaded:
            self._draw()

    def _draw(self) -> None:
        rows = plot_rows(self._points, width=self.content_size.width, height=self.content_size.height)
        text = Text("\n".join(rows), no_wrap=True)
        text.highlight_regex(BRAILLE, "cyan")
        self.update(text)
