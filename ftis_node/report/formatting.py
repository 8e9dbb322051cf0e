"""Formats of the page: numbers and text from peers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftis_node.telemetry.terminal_text import is_seen

if TYPE_CHECKING:
    from collections.abc import Sequence

    Point = tuple[float, float]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
HARD_SPACE, MINUS = "\N{NO-BREAK SPACE}", "\N{MINUS SIGN}"
PATH = re.compile(r"(?<![\w:/])/(?:[^\s/'\")]+/)+")
SMOOTH_FROM = 30  # curves with fewer points are not smoothed
SAME = 1e-9  # values with a smaller relative difference count as equal for an axis
SIGNIFICANT = 12  # significant digits of a tick
SMOOTH_SHARE = 0.04  # fraction of the curve over which a smoothed point averages


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """One curve: the CSS class of its color, and its points by x. `dots` marks each point, `fill` the area below.

    The legend shows `figure` instead of the last value.
    """

    name: str
    colour: str
    points: Sequence[Point]
    dots: bool = False
    fill: bool = False
    smooth: bool = False
    figure: str = ""


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the exponential moving average with bias correction for the first points."""
    keep = 1 - 1 / max(2.0, SMOOTH_SHARE * len(points))
    result, total, weight = [], 0.0, 0.0
    for x, y in points:
        total, weight = total * keep + y, weight * keep + 1
        result.append((x, total / weight))
    return result


def ticks(low: float, high: float, *, num_ticks: int = 4) -> list[float]:
    """Return round numbers (1, 2, 5 times a power of ten) that enclose `low` and `high`."""
    largest = max(abs(low), abs(high))
    span = high - low if high - low > SAME * largest else largest or 1.0
    rough = span / num_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    stride = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / stride + 1e-9), math.ceil(high / stride - 1e-9)
    last = max(last, first + 1)
    digits = SIGNIFICANT - math.floor(math.log10(stride))
    return [round(place * stride, digits) for place in range(first, last + 1)]


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


def alike(values: Sequence[float]) -> list[str]:
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


def short_id(peer_id: str) -> str:
    """Return the first and last characters of a peer id, which distinguish peers."""
    shown = clean(peer_id, limit=80)
    return shown if len(shown) <= 16 else f"{shown[:6]}…{shown[-6:]}"
