"""Spans, and lines of them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from ftis_node.telemetry.terminal_text import cut, printable, wrapped

MARGIN = "  | "  # before each line of a text that a model wrote


class Tone(StrEnum):
    """Meaning of a span. The widgets map it to a color."""

    PLAIN = "plain"
    STRONG = "strong"
    FAINT = "faint"  # labels and unimportant values
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"


class Span(NamedTuple):
    text: str
    tone: Tone = Tone.PLAIN


Line = tuple[Span, ...]


def line(*parts: Span | str) -> Line:
    """Return a line of spans whose text is printable; plain strings become plain spans."""
    spans = (Span(part) if isinstance(part, str) else part for part in parts)
    return tuple(Span(printable(span.text), span.tone) for span in spans)


def labeled(label: str, *parts: Span | str, width: int = 12) -> Line:
    """Return a line with a faint label in a separate column."""
    return line(Span(label.ljust(width), Tone.FAINT), *parts)


def faded(shown: Line) -> Line:
    return tuple(Span(span.text, Tone.FAINT) for span in shown)


def text_of(shown: Line) -> str:
    return "".join(span.text for span in shown)


def text_lines(lines: Iterable[Line], width: int) -> list[str]:
    """Return lines as text of at most `width` cells, wrapped after the first span, a label; a quoted text is cut."""
    texts: list[str] = []
    for shown in lines:
        head, rest = (shown[0].text, text_of(shown[1:])) if len(shown) > 1 else ("", text_of(shown))
        if head.endswith(MARGIN[-2:]):
            margin = " " * (len(head) - 2) + MARGIN[-2:]
            pieces = cut(rest, width - len(head))
            texts += [(margin if place else head) + piece for place, piece in enumerate(pieces)]
        else:
            pieces = wrapped(rest, width - len(head)) or [""]
            texts += [(" " * len(head) if place else head) + piece for place, piece in enumerate(pieces)]
    return texts
