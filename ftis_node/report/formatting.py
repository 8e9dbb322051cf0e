"""Formats of the page: numbers and text from peers."""

from __future__ import annotations

import re

from ftis_node.telemetry.terminal_text import is_seen

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
HARD_SPACE, MINUS = "\N{NO-BREAK SPACE}", "\N{MINUS SIGN}"
PATH = re.compile(r"(?<![\w:/])/(?:[^\s/'\")]+/)+")


def clean(text: object, *, limit: int = 120) -> str:
    """Return untrusted text in at most `limit` characters, without control and direction characters."""
    shown = "".join(c if is_seen(c) or c == "\n" else REPLACEMENT for c in str(text)[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def without_paths(text: object) -> str:
    """Shorten absolute paths and addresses (`/ip4/...`) to their last part, because users share reports."""
    return PATH.sub("…/", str(text))


def number(value: float | None) -> str:
    """Format with three significant digits: `0.714`, `12.3`, `1,240`, `2.1e-06`; a dash for None."""
    if value is None:
        return "–"
    size = abs(value)
    if size >= 1000 or size == int(size):
        shown = f"{size:,.0f}"
    elif size < 0.001:
        shown = f"{size:.1e}"
    else:
        shown = f"{size:.3g}" if size >= 1 else f"{size:.3f}"
    return MINUS * (value < 0) + shown


def large(value: float) -> str:
    """Format a count in few characters: `950`, `12.4 k`, `3.2 M`, `1.5 G`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f}{HARD_SPACE}{unit}"
    return f"{value:,.0f}"


def percent(value: float | None) -> str:
    """Format a fraction as `50 %` or `99.6 %`; only 1 becomes `100 %`."""
    if value is None:
        return "–"
    return f"{value * 100:.1f}".removesuffix(".0") + f"{HARD_SPACE}%"


def short_id(peer_id: str) -> str:
    """Return the first and last characters of a peer id, which distinguish peers."""
    shown = clean(peer_id, limit=80)
    return shown if len(shown) <= 16 else f"{shown[:6]}…{shown[-6:]}"
