"""Curves of a node for the dashboard in a browser, from its event log."""

from __future__ import annotations

from ftis_node.config.home import Home
from ftis_node.report.facts import EventTotals
from ftis_node.report.run_charts import run_charts
from ftis_node.report.templates import render
from ftis_node.telemetry.history import HistoryReader

SHOWN = ("Reward", "Accuracy")


class CurveDrawer:
    """Drawer that reads what the event log has since the last call, and draws again only if a point is new."""

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
            charts = [found[name] for name in SHOWN if name in found]
            self._drawn = points, render("curves.html.j2", charts=charts)
        return self._drawn[1]
