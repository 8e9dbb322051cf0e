"""Lines of spans on the screen: the one place where a tone gets its look.

Looks are the terminal's own sixteen colours and bold or dim, so they serve on any terminal; nothing is said by
colour alone. A span is never read as markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from textual.widgets import Static

from ftis_node.dashboard.view.spans import Tone

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
    """One line."""
    text = Text()
    for span in spans:
        text.append(span.text, LOOKS[span.tone])
    return text


class TextLines(Static):
    """Some lines; one that is too long ends in an ellipsis, or is wrapped where `wraps`."""

    DEFAULT_CSS = """
    TextLines { width: 1fr; height: auto; text-wrap: nowrap; text-overflow: ellipsis; }
    TextLines.-wraps { text-wrap: wrap; text-overflow: fold; }
    """

    def __init__(self, *, wraps: bool = False, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.set_class(wraps, "-wraps")
        self.lines: tuple[Line, ...] = ()

    def write(self, lines: Iterable[Line]) -> None:
        """Puts these lines in place of the former ones."""
        shown: Sequence[Line] = tuple(lines)
        if shown == self.lines:
            return
        self.lines = tuple(shown)
        self.update(Text("\n").join(as_text(spans) for spans in shown))
