from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from textual.widgets import Static

from ftis_node.dashboard.view.terminal_plot import plot_rows

if TYPE_CHECKING:
    from ftis_node.dashboard.view.terminal_plot import Points

BRAILLE = "[\u2800-\u28ff]+"


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
