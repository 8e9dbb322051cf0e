from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.dashboard.view.metric_lines import metric_lines
from ftis_node.dashboard.widgets.text_lines import TextLines

if TYPE_CHECKING:
    from ftis_node.dashboard.snapshot import NodeSnapshot


class MetricsPanel(TextLines):
    """Metric lines: workers, shares, groups, buffer, memory."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.border_title = "work"

    def show(self, snapshot: NodeSnapshot) -> None:
        self.write(metric_lines(snapshot))
