"""Head of the main screen: the node, the three answers, and how to start a stopped node again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.dashboard.view.health_answers import answer_lines, next_lines, worst_tone
from ftis_node.dashboard.view.metric_lines import head_line
from ftis_node.dashboard.view.spans import Span, Tone, line, sanitized
from ftis_node.dashboard.widgets.text_lines import TextLines

if TYPE_CHECKING:
    from ftis_node.dashboard.snapshot import NodeSnapshot

BORDERS = {"-good": Tone.GOOD, "-waits": Tone.WARN, "-bad": Tone.BAD}


class Overview(TextLines):
    """Four lines, five for a node that waits, six for a node that does not run. The border has the worst tone."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.border_title = "answers"

    def show(self, snapshot: NodeSnapshot) -> None:
        lines = [head_line(snapshot), *answer_lines(snapshot)]
        if snapshot.problem and not snapshot.is_live:
            lines.append(line(Span(sanitized(snapshot.problem), Tone.WARN)))
        lines += next_lines(snapshot)
        tone = worst_tone(snapshot)
        for name, wanted in BORDERS.items():
            self.set_class(tone is wanted, name)
        self.write(lines)
