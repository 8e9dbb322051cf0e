"""Line at the bottom of a screen for the text to search; the screen filters its rows while the user types."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.widgets import Input

if TYPE_CHECKING:
    from textual.binding import BindingType


class SearchLine(Input):
    """Input that is hidden until `open`. Enter keeps the filter, Escape clears it; both return the focus."""

    DEFAULT_CSS = """
    SearchLine, SearchLine:focus { display: none; height: 1; border: none; padding: 0 1; background: $background; }
    SearchLine.-open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [("escape", "clear", "clear")]

    def __init__(self, *, back_to: str) -> None:
        """Store `back_to`, the selector of the widget that gets the focus after the search."""
        super().__init__(placeholder="search; Enter keeps, Esc clears", id="search")
        self._back_to = back_to

    def open(self) -> None:
        self.add_class("-open")
        self.focus()

    def action_clear(self) -> None:
        self.value = ""
        self._close()

    def on_input_submitted(self) -> None:
        self._close()

    def _close(self) -> None:
        self.screen.query_one(self._back_to).focus()
        self.remove_class("-open")
