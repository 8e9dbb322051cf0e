"""Charts of a run's page, each with a sentence about its meaning."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from ftis_node.report.charts import Chart
from ftis_node.report.formatting import large, number, percent
from ftis_node.report.series import ChartSeries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from ftis_node.report.event_totals import EventTotals
    from ftis_node.telemetry.history import History, StepPoint

OWN, FOREIGN, MAIN, SECOND = "c1", "c2", "c3", "c4"
TASK_COLOURS = (MAIN, OWN, FOREIGN, SECOND)
CLOCKS = ((8.0, "%H:%M:%S"), (900.0, "%H:%M"))  # (upper bound of the bucket width in seconds, format)
DATE = "%d %b %H:%M"
LEAST_MISMATCH = 1e-16


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
    names = list(dict.fromkeys(point.task for point in history.evaluations))[: len(TASK_COLOURS)]
    return [
        ChartSeries(
            name,
            colour,
            sorted((float(point.step), point.pass_at_1) for point in history.evaluations if point.task == name),
            dots=True,
        )
        for name, colour in zip(names, TASK_COLOURS, strict=False)
    ]


def _curve(steps: Sequence[StepPoint], figure: str, colour: str, name: str, *, fill: bool = False) -> ChartSeries:
    """Return the curve of a field of the steps, smoothed if it is not filled."""
    found = ((float(point.step), getattr(point, figure)) for point in steps)
    points = [(step, float(value)) for step, value in found if value is not None]
    return ChartSeries(name, colour, points, fill=fill, smooth=not fill)
