"""Lines of spans on the screen. Only this file maps tones to styles.

Styles are the terminal's sixteen colors, bold and dim, so they work on any terminal. Color is never the only sign of a
meaning. A span is never parsed as markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.containers import VerticalScroll
from textual.widgets import Static

from ftis_node.dashboard.view.spans import Tone

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from textual.binding import BindingType

    from ftis_node.dashboard.view.spans import Line

LOOKS = {
    Tone.PLAIN: "",
    Tone.STRONG: "bold",
    Tone.FAINT: "dim",
    Tone.GOOD: "green",
    Tone.WARN: "yellow",
    Tone.BAD: "bold red",
}


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
