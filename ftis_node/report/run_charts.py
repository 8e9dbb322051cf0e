"""Charts of a run's page. matplotlib draws the curves as an SVG image; title and legend are HTML beside it.

An image in a `data:` address can neither run a script nor load anything, and the page needs no other file.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ftis_node.config.home import Home
from ftis_node.report.facts import EventTotals
from ftis_node.report.templates import render
from ftis_node.telemetry.history import History, HistoryReader, thinned
from ftis_node.view.formats import FOREIGN, MAIN, OWN, SECOND, count, number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Point = tuple[float, float]

TASK_COLORS = (MAIN, OWN, FOREIGN, SECOND)
INK = "#858b93"
WIDTH, WIDE, HEIGHT = 4.7, 10.4, 2.1  # inches
STYLE = {
    **{"svg.fonttype": "none", "svg.hashsalt": "ftis-node", "font.size": 9, "font.family": "sans-serif"},
    **{"text.color": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK, "grid.color": INK},
    **{"grid.alpha": 0.25, "axes.grid": True, "axes.grid.axis": "y", "axes.spines.top": False},
    **{"axes.spines.right": False, "axes.spines.left": False, "ytick.left": False, "lines.linewidth": 1.6},
}
SHOWN_ALONE = ("Reward", "Accuracy")  # above the dashboard in a browser
LEAST_MISMATCH = 1e-16  # a logarithmic axis has no zero
NUM_BINS = 140  # points of a curve
SMOOTH_FROM = 30  # curves with fewer points are not smoothed
SMOOTH_SHARE = 0.04  # fraction of the curve over which a smoothed point averages


class ChartSeries(NamedTuple):
    """One curve with its points by x.

    The legend leaves out a curve without a name. It shows `figure` instead of the last value.
    """

    name: str
    color: str
    points: Sequence[Point]
    figure: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart. `low` and `high` are ends of the axis; `write` formats its values. Areas are on top of each other.

    One that `is_wide` has a row of a page for itself, except on a narrow screen.
    """

    title: str
    note: str
    series: Sequence[ChartSeries]
    form: Literal["lines", "dots", "areas"] = "lines"
    low: float | None = 0.0
    high: float | None = None
    write: Callable[[float], str] = number
    is_wide: bool = False
    is_log: bool = False
    is_time: bool = False

    @property
    def is_drawn(self) -> bool:
        """Return whether a curve has two points, because tables show single values."""
        return any(len(series.points) > 1 for series in self.series)

    def legend(self) -> list[tuple[str, str, str]]:
        named = [one for one in self._with_points() if one.name]
        return [(one.color, one.name, one.figure or self.write(one.points[-1][1])) for one in named]

    def text(self) -> str:
        """Return the chart for readers who do not see it."""
        ends = (
            f"{one.name} from {self.write(one.points[0][1])} to {self.write(one.points[-1][1])}"
            for one in self._with_points()
            if one.name
        )
        return f"{self.title}: {'; '.join(ends)}"

    def image(self, *, is_wide: bool = False) -> str:
        """Return the chart as a URL with its SVG."""
        import matplotlib as mpl
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        drawn = io.BytesIO()
        with mpl.rc_context(STYLE):
            figure = Figure(figsize=(WIDE if is_wide else WIDTH, HEIGHT), layout="constrained")
            axes = figure.subplots()
            self._draw(axes, [one._replace(points=thinned(one.points, NUM_BINS)) for one in self._with_points()])
            axes.set_ylim(self.low, self.high)
            if self.is_log:
                axes.set_yscale("log")
            else:
                axes.yaxis.set_major_locator(MaxNLocator(4))
                axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: self.write(float(value))))
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            if self.is_time:
                axes.xaxis_date()
                axes.xaxis.set_major_locator(locator := AutoDateLocator())
                axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
            figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        return f"data:image/svg+xml;base64,{base64.b64encode(drawn.getvalue()).decode()}"

    def _draw(self, axes: Axes, drawn: Sequence[ChartSeries]) -> None:
        if self.form == "areas":
            steps = sorted({x for one in drawn for x, _ in one.points})
            heights = [[dict(one.points).get(step, 0.0) for step in steps] for one in drawn]
            axes.stackplot(steps, heights, colors=[one.color for one in drawn], alpha=0.6)
            return
        for one in drawn[::-1]:  # the first curve is on top
            is_smoothed = self.form == "lines" and not self.is_time and len(one.points) >= SMOOTH_FROM
            xs: Any = [datetime.fromtimestamp(x) if self.is_time else x for x, _ in one.points]
            ys = [y for _, y in one.points]
            marker = "o" if self.form == "dots" else ""
            axes.plot(xs, ys, marker=marker, markersize=4, color=one.color, alpha=0.35 if is_smoothed else 1)
            if is_smoothed:
                axes.plot(xs, smoothed(ys), color=one.color)

    def _with_points(self) -> list[ChartSeries]:
        return [one for one in self.series if one.points]


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the exponential moving average with bias correction for the first values."""
    keep = 1 - 1 / max(2.0, SMOOTH_SHARE * len(values))
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = total * keep + value, weight * keep + 1
        means.append(total / weight)
    return means


def run_charts(history: History, event_totals: EventTotals) -> tuple[list[Chart], list[Chart]]:
    """Return the charts of steps and evaluations, and those of the swarm; only charts with a curve."""
    steps = history.steps

    def curve(field: str, color: str, name: str) -> ChartSeries:
        found = ((float(point.step), getattr(point, field)) for point in steps)
        return ChartSeries(name, color, [(step, float(value)) for step, value in found if value is not None])

    tasks = [
        ChartSeries(name, color, [(float(point.step), point.pass_at_1) for point in points])
        for (name, points), color in zip(history.by_task().items(), TASK_COLORS, strict=False)
    ]
    rewards = [curve("own_reward_mean", OWN, "own"), curve("foreign_reward_mean", FOREIGN, "from peers")]
    if not rewards[0].points:
        rewards = [curve("reward_mean", MAIN, "reward")]
    mismatch = curve("mismatch_kl", FOREIGN, "mismatch")
    share: Any = {"high": 1.0, "write": percent}
    charts = [
        Chart("Accuracy", "Greedy pass@1 on held-out problems.", tasks, "dots", is_wide=True, **share),
        Chart("Reward", "Mean reward of the completions that each step trained on.", rewards),
        Chart("Loss", "Loss of each step.", [curve("loss", MAIN, "loss")], low=None),
        Chart(
            "KL",
            "KL between the learner and the weights that sampled, mean over completions, nats a token.",
            [curve("mean_kl", SECOND, "KL")],
        ),
        Chart(
            "Distance from the start",
            "KL between the model and the one that the node began with, nats a token.",
            [curve("kl_to_start", MAIN, "KL to the start"), curve("kl_from_start", OWN, "KL from the start")],
        ),
        Chart("Length", "Mean tokens of own completions.", [curve("completion_tokens", OWN, "tokens")]),
        Chart(
            "Cut and without signal",
            "This node's completions that were cut at the token limit, and its groups with equal rewards.",
            [curve("cut_fraction", SECOND, "cut"), curve("no_signal_fraction", FOREIGN, "without signal")],
            **share,
        ),
        Chart("Entropy", "Entropy of the sampling policy, nats a token.", [curve("entropy", MAIN, "entropy")]),
        Chart(
            "Kept and truncated",
            "Completions that passed the filter, and tokens whose importance weight was truncated.",
            [curve("kept_fraction", MAIN, "kept"), curve("truncated_fraction", SECOND, "truncated")],
            **share,
        ),
        Chart(
            "Groups of each step",
            "Groups of this node and groups from peers.",
            [curve("own_groups", OWN, "own"), curve("foreign_groups", FOREIGN, "from peers")],
            "areas",
        ),
        Chart(
            "Speed",
            "Tokens a second of both workers.",
            [curve("tokens_per_s", MAIN, "learner"), curve("generation_tokens_per_s", OWN, "generator")],
            write=count,
        ),
        Chart("Gradient norm", "Gradient norm before clipping.", [curve("grad_norm", SECOND, "norm")]),
        Chart(
            "Engine against learner",
            "KL between the generator's and the learner's log-probs of the same tokens, nats a token.",
            [mismatch._replace(points=[(step, max(LEAST_MISMATCH, kl)) for step, kl in mismatch.points])],
            low=None,
            is_log=True,
        ),
    ]
    traffic = event_totals.traffic
    kinds = (("generated here", "made", OWN), ("from peers", "received", FOREIGN), ("refused", "refused", SECOND))
    over_time = Chart(
        "Groups over time",
        "Groups a minute: generated here, received from peers, refused.",
        [
            ChartSeries(name, color, traffic.rates(kind), figure=f"{traffic.total(kind):,}")
            for name, kind, color in kinds
            if traffic.total(kind)
        ],
        is_wide=True,
        is_time=True,
    )
    return [one for one in charts if one.is_drawn], [one for one in (over_time,) if one.is_drawn]


class CurveDrawer:
    """Drawer for the dashboard in a browser. It reads new events, and draws again only if a point is new."""

    def __init__(self, home: Home) -> None:
        self._reader = HistoryReader(home.events, num_last_events=0)
        self._drawn: tuple[object, str] = (None, "")

    def draw(self) -> str:
        """Return the charts as HTML."""
        self._reader.poll()
        history = self._reader.history
        points = (history.steps[-1:], history.evaluations[-1:])
        if points != self._drawn[0]:
            found = {chart.title: chart for chart in run_charts(history, EventTotals())[0]}
            charts = [found[name] for name in SHOWN_ALONE if name in found]
            self._drawn = points, render("curves.html.j2", charts=charts)
        return self._drawn[1]
