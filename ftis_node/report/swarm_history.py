"""Totals of runs over the last day, kept in memory by the process that serves or writes the page of a swarm."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ftis_node.report.run_charts import Chart, ChartSeries
from ftis_node.report.swarm_page import MAX_RUNS, render_swarm
from ftis_node.swarm.overview import SwarmView
from ftis_node.view.formats import count
from ftis_node.view.palette import MAIN, OWN
from ftis_node.view.swarm import SwarmTotals, totals

PERIOD_S = 300.0
NUM_POINTS = 288  # a day
Points = deque[tuple[float, SwarmTotals]]


class SwarmHistory:
    """One point in five minutes for each run that was in the last views."""

    def __init__(self) -> None:
        self._points: dict[str, Points] = {}

    def note(self, views: Sequence[SwarmView], *, now: float) -> None:
        """Add a point for each run whose last one is old enough. Forget runs that are not in `views`."""
        empty: Points = deque(maxlen=NUM_POINTS)
        self._points = {view.run.id: self._points.get(view.run.id, empty.copy()) for view in views[:MAX_RUNS]}
        for view in views[:MAX_RUNS]:
            points = self._points[view.run.id]
            if not points or now - points[-1][0] >= PERIOD_S:
                points.append((now, totals(view, now=now)))

    def charts(self, run_id: str) -> list[Chart]:
        points = tuple(self._points.get(run_id, ()))  # another thread adds points
        nodes = [(at, float(total.num_active)) for at, total in points]
        tokens = [(at, total.tokens_per_minute) for at, total in points]
        drawn = [
            Chart("Active nodes", "In the last day.", [ChartSeries("nodes", OWN, nodes)], low=0.0, is_time=True),
            Chart(
                "Tokens a minute",
                "Completion tokens of active nodes, in the last day.",
                [ChartSeries("tokens", MAIN, tokens)],
                low=0.0,
                write=count,
                is_time=True,
            ),
        ]
        return [chart for chart in drawn if chart.is_drawn]

    def render(self, views: Sequence[SwarmView], *, is_live: bool = True, **options: Any) -> str:
        """Return the page with these charts; the options are those of `render_swarm`."""
        return render_swarm(views, charts_of=self.charts, is_live=is_live, **options)
