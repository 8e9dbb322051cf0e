"""Formats of the page: numbers, times, text from peers."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
HARD_SPACE, MINUS = "\N{NO-BREAK SPACE}", "\N{MINUS SIGN}"
PATH = re.compile(r"(?<![\w:/])/(?:[^\s/'\")]+/)+")
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400


def clean(text: object, *, limit: int = 120) -> str:
    """Return untrusted text in at most `limit` characters, without control and direction characters."""
    shown = "".join(c if c.isprintable() or c == "\n" else REPLACEMENT for c in str(text)[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def without_paths(text: object) -> str:
    """Shorten absolute paths and addresses (`/ip4/...`) to their last part, because users share reports."""
    return PATH.sub("…/", str(text))


def number(value: float | None) -> str:
    """Format with three significant digits: `0.714`, `12.3`, `1,240`, `2.1e-06`; a dash for None."""
    if value is None:
        return "–"
    size = abs(value)
    if size >= 1000 or value == int(value):
        shown = f"{value:,.0f}"
    elif size < 0.001:
        shown = f"{value:.1e}"
    else:
        shown = f"{value:.3g}" if size >= 1 else f"{value:.3f}"
    return shown.replace("-", MINUS) if size >= 0.001 else shown.replace("-", MINUS, 1) if value < 0 else shown


def alike(values: Sequence[float]) -> list[str]:
    """Format the numbers of an axis with equally many decimals."""
    num_decimals = max((len(f"{abs(value):.9f}".rstrip("0").partition(".")[2]) for value in values), default=0)
    return [f"{value:,.{num_decimals}f}".replace("-", MINUS) for value in values]


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


def length(seconds: float) -> str:
    """Format a duration with its two largest units: `1 d 3 h`, `2 h 5 min`, `84 s`."""
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < HOUR_S:
        return f"{seconds // MINUTE_S:.0f} min {seconds % MINUTE_S:.0f} s"
    if seconds < DAY_S:
        return f"{seconds // HOUR_S:.0f} h {seconds % HOUR_S // MINUTE_S:.0f} min"
    return f"{seconds // DAY_S:.0f} d {seconds % DAY_S // HOUR_S:.0f} h"


def clock(unix_s: float) -> str:
    """Format a local date and time: `2026-05-04 12:30:01`."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def short_id(peer_id: str) -> str:
    """Return the first and last characters of a peer id, which distinguish peers."""
    shown = clean(peer_id, limit=80)
    return shown if len(shown) <= 16 else f"{shown[:6]}…{shown[-6:]}"


def plural(count: int, thing: str) -> str:
    """Return `1 step`, `2 steps`."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"
