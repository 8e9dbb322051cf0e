"""Lines of spans on the screen. Only this file maps tones to styles.

Styles are the terminal's sixteen colors, bold and dim, so they work on any terminal. Color is never the only sign of a
meaning. A span is never parsed as markup.

Keys of a screen, in its bottom line. A click presses one.

Textual's own footer stays empty in a browser page without focus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.containers import VerticalScroll
from textual.widgets import Input, Static

from ftis_node.dashboard.view.spans import Span, Tone, line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from textual.binding import BindingType
    from textual.events import Click

    from ftis_node.dashboard.view.spans import Line

LOOKS = {
    Tone.PLAIN: "",
    Tone.STRONG: "bold",
    Tone.FAINT: "dim",
    Tone.GOOD: "green",
    Tone.WARN: "yellow",
    Tone.BAD: "bold red",
}
KEY_NAMES = {"Enter": "enter", "Esc": "escape", "?": "question_mark", "/": "slash"}


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


def as_text(spans: Line) -> Text:
    text = Text()
    for span in spans:
        text.append(span.text, LOOKS[span.tone])
    return text


class TextLines(Static):
    """Lines of text; a line that is too long ends in an ellipsis, or wraps if `wraps`."""

    DEFAULT_CSS = """
    TextLines { width: 1fr; height: auto; text-wrap: nowrap; text-overflow: ellipsis; }
    TextLines.-wraps { text-wrap: wrap; text-overflow: fold; }
    """

    def __init__(self, *, wraps: bool = False, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.set_class(wraps, "-wraps")
        self.lines: tuple[Line, ...] = ()

    def write(self, lines: Iterable[Line]) -> None:
        """Replace the lines."""
        shown: Sequence[Line] = tuple(lines)
        if shown == self.lines:
            return
        self.lines = tuple(shown)
        self.update(Text("\n").join(as_text(spans) for spans in shown))


class Scroller(VerticalScroll):
    """Scrolling container that also takes the keys of vi and less."""

    BINDINGS: ClassVar[list[BindingType]] = [("j", "scroll_down", "down"), ("k", "scroll_up", "up")]


class KeysLine(TextLines):
    """One line of keys and their actions."""

    DEFAULT_CSS = "KeysLine { dock: bottom; height: 1; }"

    def __init__(self, *keys: tuple[str, str]) -> None:
        super().__init__(id="keys")
        self._keys = keys

    def on_mount(self) -> None:
        spans = (part for key, what in self._keys for part in (Span(f" {key}", Tone.STRONG), f" {what} "))
        self.write([line(*spans)])

    def on_click(self, event: Click) -> None:
        """Press the key under the mouse, for a phone without a keyboard."""
        right = 0
        for key, what in self._keys:
            right += len(f" {key} {what} ")
            if event.x < right:
                self.app.simulate_key(KEY_NAMES.get(key, key))
                return
