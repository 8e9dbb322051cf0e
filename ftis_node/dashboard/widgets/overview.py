"""The head of the screen: who the node is, the three answers, and what to do with one that is not running."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.dashboard.view.answers import answer_lines, next_lines
from ftis_node.dashboard.view.metric_lines import head_line
from ftis_node.dashboard.view.spans import Span, Tone, harmless, line
from ftis_node.dashboard.widgets.text_lines import TextLines

if TYPE_CHECKING:
    from ftis_node.dashboard.snapshot import Reading


class Overview(TextLines):
    """Four lines, six for a node that does not run."""

    def show(self, reading: Reading) -> None:
        """The node as it was found."""
        lines = [head_line(reading), *answer_lines(reading)]
        if reading.problem and not reading.is_live:
            lines.append(line(Span(harmless(reading.problem), Tone.WARN)))
        lines += next_lines(reading)
        self.write(lines)
