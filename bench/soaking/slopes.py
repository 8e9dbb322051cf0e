"""Growth of a quantity: a robust slope, its confidence interval, and a verdict.

The slope is Theil and Sen's, the median of the slopes of all pairs of points (Sen 1968, J. Am. Stat. Assoc. 63). A few
peaks do not change it. Neighboring samples of memory or disk are alike, so an interval for independent samples would be
far too narrow. The interval comes from a bootstrap of whole blocks of residuals (Kuensch 1989). Points are medians of
equal stretches of time, as many as keep that cheap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


MOST_POINTS = 48
LEAST_POINTS = 12
NUM_BLOCKS = 6  # along the whole series
NUM_DRAWS = 200
CONFIDENCE = 0.95
MINUTES = 60.0  # slopes are given per hour


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of `flat` per hour: a share of the level, or an amount in the unit of the quantity."""

    share: float = 0.02
    amount: float = 0.0
    coarse_share: float = 0.25  # an interval that is wider on either side gives no verdict

    def small(self, level: float) -> float:
        """Return the growth per hour below which a figure of this level is flat."""
        return max(self.share * abs(level), self.amount)

    def coarse(self, level: float) -> float:
        """Return the half width above which an interval is too wide for a verdict."""
        return max(self.coarse_share * abs(level), 4 * self.amount)


@dataclass(frozen=True, slots=True)
class Trend:
    """`slope`, and the interval `low` to `high` that holds it at 95 %, all an hour; `level` is the median."""

    level: float
    slope: float
    low: float
    high: float
    num_points: int

    def verdict(self, bounds: Bounds) -> str:
        """Return the verdict: `grows`, `falls`, `flat` or `unclear`.

        `flat`: no significant growth, or one too small to matter. `unclear`: the samples are too few or too noisy.
        """
        small = bounds.small(self.level)
        if self.low <= 0 <= self.high:
            is_told = self.high - self.slope <= max(bounds.coarse(self.level), small)
            return "flat" if is_told or self.high <= small else "unclear"
        if abs(self.slope) <= small:
            return "flat"
        return "grows" if self.slope > 0 else "falls"


def trend(minutes: Sequence[float], values: Sequence[float]) -> Trend | None:
    """Return the trend of a series, or None if it is too short."""
    if len(values) < LEAST_POINTS:
        return None
    times, points = condensed(np.asarray(minutes, float), np.asarray(values, float))
    slope = sen_slope(times, points)
    level = float(np.median(points))
    residuals = points - np.median(points - slope * times) - slope * times
    rng = np.random.default_rng(0)
    drawn = [sen_slope(times, drawn_blocks(residuals, rng)) for _ in range(NUM_DRAWS)]
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Trend(level, slope * MINUTES, (slope - high) * MINUTES, (slope - low) * MINUTES, len(points))


def sen_slope(times: Floats, points: Floats) -> float:
    """Return the median of the slopes of all pairs of points."""
    first, second = np.triu_indices(len(times), k=1)
    return float(np.median((points[second] - points[first]) / (times[second] - times[first])))


def condensed(times: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return at most MOST_POINTS medians of intervals of equal length, in order of time."""
    stretches = np.array_split(np.argsort(times, kind="stable"), min(MOST_POINTS, len(times)))
    return (
        np.array([np.median(times[stretch]) for stretch in stretches]),
        np.array([np.median(values[stretch]) for stretch in stretches]),
    )


def drawn_blocks(residuals: Floats, rng: np.random.Generator) -> Floats:
    """Return as many residuals, in blocks with random starts. The series is treated as a ring."""
    length = math.ceil(len(residuals) / NUM_BLOCKS)
    starts = rng.integers(len(residuals), size=NUM_BLOCKS)
    places = (starts[:, None] + np.arange(length)[None, :]).ravel()[: len(residuals)]
    return residuals[places % len(residuals)]
