"""Formats of numbers, times and ids; colors of plots and reports, readable on a light and on a dark page."""

from __future__ import annotations

import time

from ftis_node.telemetry.terminal_text import printable

SHORT_ID = 12
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400
OWN, FOREIGN, MAIN, SECOND = "#3f83dd", "#d9771c", "#1c9c72", "#cf4f8d"
CURVES = (MAIN, OWN, FOREIGN, SECOND, "#8a6fd1", "#9a8a1e", "#2aa3b8", "#b5543f", "#6b8f3a", "#a4779f")


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
