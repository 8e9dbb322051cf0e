"""Screen of the whole swarm: a row for each peer, and who learns from whom; updated regularly."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ftis_node.dashboard.page import Page, SwarmRead
from ftis_node.dashboard.view.spans import Span, Tone, line
from ftis_node.dashboard.widgets import KeysLine, Scroller, TextLines
from ftis_node.errors import FtisError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from textual.app import ComposeResult

PERIOD_S = 5.0
TITLE_TONES = {"run ": Tone.STRONG, "name ": Tone.FAINT, "who learns": Tone.STRONG}


class SwarmScreen(Page):
    """Screen with one text that scrolls both ways."""

    DEFAULT_CSS = "SwarmScreen TextLines { width: auto; }"

    def __init__(self, read: Callable[[], Any]) -> None:
        """Store `read`, which returns the document of `/swarm` and runs in a thread."""
        super().__init__()
        self._read = read
        self._is_over = threading.Event()

    def compose(self) -> ComposeResult:
        with Scroller():
            yield TextLines(id="swarm")
        yield KeysLine(("arrows", "scroll"), ("Esc", "back"), ("q", "quit"))

    def on_mount(self) -> None:
        self.query_one("#swarm", TextLines).write([line("reading the swarm ...")])
        self.query_one(Scroller).focus()
        self.call_after_refresh(self.run_worker, self._watch, thread=True, name="swarm")

    def on_unmount(self) -> None:
        self._is_over.set()

    def on_swarm_read(self, message: SwarmRead) -> None:
        self.query_one("#swarm", TextLines).write(line(Span(text, _tone(text))) for text in message.lines)

    def _watch(self) -> None:
        while not self._is_over.is_set():
            self.post_message(SwarmRead(self._look()))
            self._is_over.wait(PERIOD_S)

    def _look(self) -> list[str]:
        from ftis_node.swarm.overview import SwarmView, render_views

        try:
            return render_views([SwarmView.from_dict(one) for one in self._read()])
        except (FtisError, OSError, TypeError, ValueError) as error:  # no node, or a damaged document
            return [str(error)]


def _tone(text: str) -> Tone:
    return next((tone for start, tone in TITLE_TONES.items() if text.startswith(start)), Tone.PLAIN)
