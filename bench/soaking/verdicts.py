"""Table of a soak: for each quantity the sum over the swarm's nodes, its trend after the warm-up, and a verdict.

Nodes are summed, so that a leak in one of them shows. One false alarm in twenty is then one in twenty quantities, not
in a hundred. Answers and lags are means over nodes. The bootstrap node and the machine have separate rows.

Quantities in milliseconds describe the nodes only if they have the machine to themselves. Their samples up to
DISTURBED_MINUTES after the host took more than DISTURBED_PERCENT of the time are not judged. If less than half of the
time is left, the verdict is `unclear`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from soaking.sampling import MACHINE, Point
from soaking.slopes import Bounds, Trend, trend

BOUNDS = {
    "rss_mib": Bounds(amount=4.0),
    "uss_mib": Bounds(amount=4.0),
    "descriptors": Bounds(amount=2.0),
    "threads": Bounds(amount=2.0),
    "cpu_percent": Bounds(share=0.1, amount=5.0, coarse_share=1.0),
    "disk_mib": Bounds(amount=1.0),
    "rows": Bounds(share=0.05, amount=200.0),
    "answer_ms": Bounds(share=0.25, amount=10.0, coarse_share=1.0),
    "answer_bytes": Bounds(share=0.05, amount=2000.0),
    "lag_ms": Bounds(share=0.25, amount=5.0, coarse_share=1.0),
    "loop_ms": Bounds(share=0.1, amount=0.5, coarse_share=1.0),
    "stolen_percent": Bounds(share=0.25, amount=2.0, coarse_share=1.0),
}
BY_THEMSELVES = {"bootstrap", MACHINE}
MEANS = {"answer_ms", "answer_bytes", "lag_ms"}
TIMED = {"answer_ms", "lag_ms"}
DISTURBED_PERCENT, DISTURBED_MINUTES = 5.0, 1.5  # lags are those of the last minute
FIXED_MIB = 0.5  # files that are smaller than this over all nodes count as `other`
WARM_UP_SHARE, WARM_UP_MINUTES = 1 / 3, 10.0


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity of one part over the soak, summed or averaged over the nodes that have it."""

    who: str
    quantity: str
    part: str
    minutes: list[float]
    values: list[float]


@dataclass(frozen=True, slots=True)
class Finding:
    """A series, its trend after the warm-up, and the verdict."""

    series: Series
    trend: Trend
    verdict: str

    def as_dict(self) -> dict[str, Any]:
        """Return the finding for the JSON line."""
        figures = {name: round(float(getattr(self.trend, name)), 4) for name in ("level", "slope", "low", "high")}
        where = {"who": self.series.who, "quantity": self.series.quantity, "part": self.series.part}
        return where | figures | {"verdict": self.verdict}


def warm_up_minutes(minutes: float) -> float:
    """Return the minutes that are excluded at the start: the first third, at most ten."""
    return min(WARM_UP_SHARE * minutes, WARM_UP_MINUTES)


def series_of(points: Iterable[Point]) -> list[Series]:
    """Return the samples as series, with small files combined, without moments at which a node is missing."""
    at_moments: dict[tuple[str, str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    points = list(points)
    largest: dict[str, float] = defaultdict(float)
    for point in points:
        if point.quantity == "disk_mib":
            largest[point.part] = max(largest[point.part], point.value)
    for point in points:
        who = point.node if point.node in BY_THEMSELVES else "nodes"
        is_small = point.quantity == "disk_mib" and largest[point.part] < FIXED_MIB
        part = "other" if is_small else point.part
        at_moments[who, point.quantity, part][point.minute].append(point.value)
    return [Series(*key, *_merged(key[1], moments)) for key, moments in sorted(at_moments.items())]


def _merged(quantity: str, moments: dict[float, list[float]]) -> tuple[list[float], list[float]]:
    merge = np.mean if quantity in MEANS else np.sum
    whole = max(map(len, moments.values()))
    kept = [(minute, float(merge(values))) for minute, values in sorted(moments.items()) if len(values) == whole]
    return [minute for minute, _ in kept], [value for _, value in kept]


def findings_of(series: Sequence[Series], *, after: float) -> list[Finding]:
    """Return the findings of bounded series from minute `after`, without series that are too short."""
    disturbed = disturbances(series)
    found = []
    for one in series:
        if one.quantity not in BOUNDS:
            continue
        late = [(minute, value) for minute, value in zip(one.minutes, one.values, strict=True) if minute >= after]
        judged = [sample for sample in late if is_calm(sample[0], disturbed)] if one.quantity in TIMED else late
        is_enough = 2 * len(judged) >= len(late)
        known = _trend(judged if is_enough else late)
        if known is not None:
            found.append(Finding(one, known, known.verdict(BOUNDS[one.quantity]) if is_enough else "unclear"))
    return found


def disturbances(series: Iterable[Series]) -> list[float]:
    """Return the minutes at which the host had taken much of the time since the sample before."""
    return [
        minute
        for one in series
        if one.quantity == "stolen_percent"
        for minute, percent in zip(one.minutes, one.values, strict=True)
        if percent > DISTURBED_PERCENT
    ]


def is_calm(minute: float, disturbed: Iterable[float]) -> bool:
    """Return whether none of these minutes is at this one or shortly before it."""
    return not any(minute - DISTURBED_MINUTES <= other <= minute for other in disturbed)


def _trend(samples: Sequence[tuple[float, float]]) -> Trend | None:
    return trend([minute for minute, _ in samples], [value for _, value in samples])


def per_minute(
    series: Sequence[Series], part: str, *, after: float = 0.0, before: float = float("inf")
) -> float | None:
    """Return the rate per minute of a count (`done`) of all nodes between two minutes."""
    for one in series:
        if (one.quantity, one.part) == ("done", part):
            late = [(m, v) for m, v in zip(one.minutes, one.values, strict=True) if after <= m <= before]
            if len(late) > 1:
                return (late[-1][1] - late[0][1]) / (late[-1][0] - late[0][0])
    return None


def markdown(findings: Sequence[Finding]) -> str:
    """Return the table for the documentation."""
    rows = ["| of | quantity | part | level | an hour | 95 % interval | verdict |", "|---|---|---|--:|--:|---|---|"]
    for finding in findings:
        known, one = finding.trend, finding.series
        interval = f"{known.low:+.2f} to {known.high:+.2f}"
        figures = f"{known.level:.1f} | {known.slope:+.2f} | {interval}"
        rows.append(f"| {one.who} | {one.quantity} | {one.part} | {figures} | {finding.verdict} |")
    return "\n".join(rows) + "\n"
