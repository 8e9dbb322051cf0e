"""Series of a chart: thinned, smoothed, with round axis numbers. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    Point = tuple[float, float]

NUM_BINS = 140
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


def thin(points: Sequence[Point], *, num_bins: int = NUM_BINS) -> list[Point]:
    """Return at most `num_bins` points, each the mean of consecutive ones; short curves are unchanged."""
    if len(points) <= num_bins:
        return list(points)
    edges = [round(place * len(points) / num_bins) for place in range(num_bins + 1)]
    slices = [points[begin:end] for begin, end in zip(edges[:-1], edges[1:], strict=True)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in slices]


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
