"""Charts of a run's page, each with a sentence about its meaning, as HTML with an inline SVG in the page's colors.

The SVG is stretched to its box and holds only lines, whose width stays constant. All text is HTML beside the SVG, so
that a phone shows it in full size. Invisible columns show the values under the pointer, without a script.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

from ftis_node.report.formatting import SMOOTH_FROM, ChartSeries, alike, large, number, percent, smoothed, ticks
from ftis_node.telemetry.history import thinned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftis_node.report.facts import EventTotals
    from ftis_node.report.formatting import Point
    from ftis_node.telemetry.history import History, StepPoint

OWN, FOREIGN, MAIN, SECOND = "c1", "c2", "c3", "c4"
TASK_COLOURS = (MAIN, OWN, FOREIGN, SECOND)
CLOCKS = ((8.0, "%H:%M:%S"), (900.0, "%H:%M"))  # (upper bound of the bucket width in seconds, format)
DATE = "%d %b %H:%M"
LEAST_MISMATCH = 1e-16
NUM_BINS = 140  # points of a curve
MAX_COLUMNS = 120
PER_MILLE = 1000.0  # the SVG's own width and height


@dataclass
class Chart:
    """A chart. `low` and `high` extend the axis; `write_x` and `write_y` format its numbers.

    If stacked, the first curve starts at zero and each further one at the sum of those before it. All have the same x.
    """

    title: str
    note: str
    series: Sequence[ChartSeries]
    x_name: str = "step"
    low: float | None = None
    high: float | None = None
    write_x: Callable[[float], str] = number
    write_y: Callable[[float], str] = number
    is_stacked: bool = False
    is_wide: bool = False

    def draw(self) -> Markup | None:
        """Return the chart; None if no curve has two points, because tables show single values."""
        self._drawn = [series for series in self.series if series.points]
        if all(len(series.points) < 2 for series in self._drawn):
            return None
        self._thinned = {series.name: thinned(series.points, NUM_BINS) for series in self._drawn}
        self._drawn_points = _stacked(self._thinned) if self.is_stacked else self._thinned
        every = [point for points in self._drawn_points.values() for point in points]
        ends = [end for end in (self.low, self.high) if end is not None]
        values = [y for _, y in every] + ends
        self._y_ticks = ticks(min(values), max(values))
        self._x0, self._x1 = min(x for x, _ in every), max(x for x, _ in every)
        return self._figure()

    def _figure(self) -> Markup:
        legend = Markup("").join(
            Markup('<span class="key {}"><i></i>{} <b>{}</b></span>').format(
                series.colour, series.name, series.figure or self.write_y(series.points[-1][1])
            )
            for series in self._drawn
        )
        return Markup(
            '<figure class="chart{}"><figcaption><h3>{}</h3><p>{}</p><div class="keys">{}</div></figcaption>'
            '<div class="plot">{}<div class="box" role="img" aria-label="{}">'
            '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{}</svg>{}</div>{}</div>'
            "</figure>"
        ).format(
            *(" wide" if self.is_wide else "", self.title, self.note, legend),
            *(self._y_labels(), self._text_summary(), self._lines(), self._columns(), self._x_labels()),
        )

    def _across(self, x: float) -> float:
        """Return the horizontal position, 0 (left) to 1 (right); a single point is in the middle."""
        return 0.5 if self._x1 == self._x0 else (x - self._x0) / (self._x1 - self._x0)

    def _up(self, y: float) -> float:
        """Return the vertical position, 0 (bottom) to 1 (top)."""
        low, high = self._y_ticks[0], self._y_ticks[-1]
        return (y - low) / (high - low)

    def _at(self, point: Point) -> str:
        return f"{self._across(point[0]) * PER_MILLE:.1f} {(1 - self._up(point[1])) * PER_MILLE:.1f}"

    def _lines(self) -> Markup:
        grid = [f'<path class="grid" d="M0 {(1 - self._up(tick)) * PER_MILLE:.1f}H1000"/>' for tick in self._y_ticks]
        # Reversed, so that the first curve is on top.
        curves = [path for series in self._drawn[::-1] for path in self._curve(series)]
        return Markup("".join([*grid, *curves]))  # nosec B704: numbers and our own class names only

    def _curve(self, series: ChartSeries) -> list[str]:
        points = self._drawn_points[series.name]
        places = [self._at(point) for point in points]
        paths = []
        if series.fill:
            first, last = places[0].split()[0], places[-1].split()[0]
            paths.append(f'<path class="area {series.colour}" d="M{first} 1000L{"L".join(places)}L{last} 1000Z"/>')
        is_smooth = series.smooth and len(points) >= SMOOTH_FROM
        if len(points) > 1:
            faint = " faint" if is_smooth else ""
            paths.append(f'<path class="line {series.colour}{faint}" d="M{"L".join(places)}"/>')
        if is_smooth:
            even = "L".join(self._at(point) for point in smoothed(points))
            paths.append(f'<path class="line {series.colour}" d="M{even}"/>')
        if series.dots or len(points) == 1:
            paths.append(f'<path class="dots {series.colour}" d="{"".join(f"M{place}h0" for place in places)}"/>')
        return paths

    def _columns(self) -> Markup:
        """Return one invisible column for each x of the longest curve, with the values to show under the pointer."""
        longest = max(self._thinned.values(), key=len)
        xs = [x for x, _ in thinned(longest, MAX_COLUMNS)]
        width = 100 / max(1, len(xs) - 1) if len(xs) > 1 else 100
        columns = Markup("")
        for x in xs:
            middle = self._across(x) * 100
            left, right = max(0.0, middle - width / 2), min(100.0, middle + width / 2)  # no column beyond the plot
            columns += Markup('<i class="{}" style="left:{:.2f}%;width:{:.2f}%" data-tip="{}"></i>').format(
                "r" if middle > 50 else "l", left, right - left, self._tooltip(x)
            )
        return columns

    def _tooltip(self, x: float) -> str:
        lines = [f"{self.x_name} {self.write_x(x)}".strip()]
        reach = (self._x1 - self._x0) / MAX_COLUMNS + 1e-9
        for series in self._drawn:
            near = min(self._thinned[series.name], key=lambda point: abs(point[0] - x))
            if abs(near[0] - x) <= reach:
                lines.append(f"{series.name} {self.write_y(near[1])}")
        return "\n".join(lines)

    def _text_summary(self) -> str:
        parts = (
            f"{series.name} from {self.write_y(series.points[0][1])} to {self.write_y(series.points[-1][1])}"
            for series in self._drawn
        )
        return f"{self.title}: {'; '.join(parts)}"

    def _y_labels(self) -> Markup:
        ticks_here, write = self._y_ticks, self.write_y
        written = alike(ticks_here) if write is number else [write(tick) for tick in ticks_here]
        labels = (
            Markup('<span style="top:{:.2f}%">{}</span>').format((1 - self._up(tick)) * 100, text)
            for tick, text in zip(ticks_here, written, strict=True)
        )
        return Markup('<div class="ys">{}</div>').format(Markup("").join(labels))

    def _x_labels(self) -> Markup:
        labels = (
            Markup('<span style="left:{:.2f}%">{}</span>').format(self._across(x) * 100, self.write_x(x))
            for x in self._x_ticks()
        )
        return Markup('<div class="xs">{}</div>').format(Markup("").join(labels))

    def _x_ticks(self) -> list[float]:
        """Return round numbers of steps, or quarters of a time span, without those so near an end that text would
        overflow.
        """
        if self._x0 == self._x1:
            return [self._x0]
        if self.x_name == "step":
            inside = [x for x in ticks(self._x0, self._x1) if self._x0 <= x <= self._x1 and x == round(x)]
            return inside if len(inside) > 1 else [self._x0, self._x1]
        return [self._x0 + part * (self._x1 - self._x0) for part in (0.06, 0.28, 0.5, 0.72, 0.94)]


def _stacked(curves: dict[str, list[Point]]) -> dict[str, list[Point]]:
    """Return each curve on top of the sum of those before it."""
    result: dict[str, list[Point]] = {}
    ground: dict[float, float] = {}
    for name, points in curves.items():
        result[name] = [(x, y + ground.get(x, 0.0)) for x, y in points]
        ground = dict(result[name])
    return result


def learning_charts(history: History) -> list[Markup]:
    """Return the charts of steps and evaluations that have values."""
    steps = history.steps
    charts = [
        Chart(
            "Accuracy",
            "Greedy pass@1 on held-out problems.",
            _tasks(history),
            low=0.0,
            high=1.0,
            write_y=percent,
            is_wide=True,
        ),
        Chart(
            "Reward",
            "Mean reward of the completions that each step trained on.",
            _rewards(steps),
            low=0.0,
        ),
        Chart("Loss", "Loss of each step.", [_curve(steps, "loss", MAIN, "loss")]),
        Chart(
            "KL",
            "KL between the learner and the weights that sampled, mean over completions, nats a token.",
            [_curve(steps, "mean_kl", SECOND, "KL")],
            low=0.0,
        ),
        Chart(
            "Kept and truncated",
            "Completions that passed the filter, and tokens whose importance weight was truncated.",
            [
                _curve(steps, "kept_fraction", MAIN, "kept"),
                _curve(steps, "truncated_fraction", SECOND, "truncated"),
            ],
            low=0.0,
            high=1.0,
            write_y=percent,
        ),
        Chart(
            "Groups of each step",
            "Groups of this node and groups from peers.",
            [
                _curve(steps, "own_groups", OWN, "own", fill=True),
                _curve(steps, "foreign_groups", FOREIGN, "from peers", fill=True),
            ],
            low=0.0,
            is_stacked=True,
        ),
        Chart(
            "Speed",
            "Tokens a second of both workers.",
            [
                _curve(steps, "tokens_per_s", MAIN, "learner"),
                _curve(steps, "generation_tokens_per_s", OWN, "generator"),
            ],
            low=0.0,
            write_y=large,
        ),
        Chart(
            "Gradient norm",
            "Gradient norm before clipping.",
            [_curve(steps, "grad_norm", SECOND, "norm")],
            low=0.0,
        ),
        _mismatch(steps),
    ]
    return [drawn for chart in charts if (drawn := chart.draw())]


def traffic_chart(event_totals: EventTotals) -> Markup | None:
    """Return the chart of groups made, received and rejected over time."""
    traffic = event_totals.traffic
    form = next((form for limit_s, form in CLOCKS if traffic.width_s < limit_s), DATE)
    kinds = (("generated here", "made", OWN), ("from peers", "received", FOREIGN), ("rejected", "refused", SECOND))
    return Chart(
        "Groups over time",
        "Groups a minute: generated here, received from peers, rejected.",
        [
            ChartSeries(name, colour, traffic.rates(kind), figure=f"{traffic.total(kind):,}")
            for name, kind, colour in kinds
            if traffic.total(kind)
        ],
        x_name="",
        low=0.0,
        is_wide=True,
        write_x=lambda unix_s: time.strftime(form, time.localtime(unix_s)),
    ).draw()


def _rewards(steps: Sequence[StepPoint]) -> list[ChartSeries]:
    if all(point.own_reward_mean is None for point in steps):
        return [_curve(steps, "reward_mean", MAIN, "reward")]
    peers = _curve(steps, "foreign_reward_mean", FOREIGN, "from peers")
    return [_curve(steps, "own_reward_mean", OWN, "own"), peers]


def _mismatch(steps: Sequence[StepPoint]) -> Chart:
    """Return a chart with a logarithmic axis. If two engines agree, the KL is about the rounding error."""
    logs = [
        (float(point.step), math.log10(max(LEAST_MISMATCH, point.mismatch_kl)))
        for point in steps
        if point.mismatch_kl is not None
    ]
    return Chart(
        "Engine against learner",
        "KL between the generator's and the learner's log-probs of the same tokens, nats a token.",
        [ChartSeries("mismatch", FOREIGN, logs)],
        write_y=lambda power: number(10.0**power) if power != round(power) else f"1e{power:.0f}",
    )


def _tasks(history: History) -> list[ChartSeries]:
    return [
        ChartSeries(name, colour, [(float(point.step), point.pass_at_1) for point in points], dots=True)
        for (name, points), colour in zip(history.by_task().items(), TASK_COLOURS, strict=False)
    ]


def _curve(steps: Sequence[StepPoint], figure: str, colour: str, name: str, *, fill: bool = False) -> ChartSeries:
    """Return the curve of a field of the steps, smoothed if it is not filled."""
    found = ((float(point.step), getattr(point, figure)) for point in steps)
    points = [(step, float(value)) for step, value in found if value is not None]
    return ChartSeries(name, colour, points, fill=fill, smooth=not fill)
