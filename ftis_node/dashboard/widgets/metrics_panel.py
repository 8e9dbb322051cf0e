"""The lines of figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.dashboard.view.metric_lines import figure_lines
from ftis_node.dashboard.widgets.text_lines import TextLines

if TYPE_CHECKING:
    from ftis_node.dashboard.snapshot import Reading


class Figures(TextLines):
    """Workers, shares, groups, buffer, memory."""

    def show(self, reading: Reading) -> None:
        """The figures as they were found."""
        self.write(figure_lines(reading))
