"""Spans and lines; formats of numbers, sizes, times and text from peers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from ftis_node.telemetry.terminal_text import cut, printable, wrapped

SHORT_ID = 12
MARGIN = "  | "  # before each line of a text that a model wrote
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400


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


def short_id(peer_id: str) -> str:
    """Return the last characters of a peer id, because all ids begin alike."""
    return "…" + printable(peer_id)[-8:] if len(peer_id) > SHORT_ID else printable(peer_id)


def number(value: float | None, *, digits: int = 3) -> str:
    """Format with significant digits, or as a whole number: `0.714`, `12.3`, `1,240`, `2.1e-06`; `-` for None."""
    if value is None:
        return "-"
    is_whole = value == int(value) if abs(value) < 1e15 else False
    return f"{value:,.0f}" if is_whole or 1000 <= abs(value) < 1e15 else f"{value:.{digits}g}"


def percent(part: float | None) -> str:
    """Format a fraction as `50 %` or `99.6 %`; only 1 becomes `100 %`; `-` for None."""
    return "-" if part is None else f"{100 * part:.1f}".removesuffix(".0") + " %"


def count(value: float) -> str:
    """Format a large number in four or five characters: 152k, 3.1B."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.0f}{unit}" if scaled >= 100 else f"{scaled:.1f}{unit}"
    return f"{value:.0f}"


def ago(then: float, now: float) -> str:
    """Format with one unit: 5 s, 3 min, 2 h, 4 d; `never` for 0."""
    if not then:
        return "never"
    seconds = max(0, int(now - then))
    for unit_s, unit in ((DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "min")):
        if seconds >= unit_s:
            return f"{seconds // unit_s} {unit}"
    return f"{seconds} s"


def clock(unix_s: float) -> str:
    """Format the local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))
