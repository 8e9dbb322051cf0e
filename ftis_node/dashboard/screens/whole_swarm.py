"""Screen of the whole swarm and its application: a row for each peer, and who learns from whom; updated regularly."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from textual.app import App

from ftis_node.dashboard.context import Page, SwarmRead
from ftis_node.dashboard.view.spans import Span, Tone, line
from ftis_node.dashboard.widgets import KeysLine, Scroller, TextLines
from ftis_node.errors import FtisError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from textual.app import ComposeResult
    from textual.screen import Screen

PERIOD_S = 5.0
TITLE_TONES = {"run ": Tone.STRONG, "name ": Tone.FAINT, "who learns": Tone.STRONG}


class SwarmScreen(Page):
    """Screen with one text that scrolls both ways."""

    DEFAULT_CSS = "SwarmScreen TextLines { width: auto; }"

    def __init__(self, read: Callable[[], Any], *, period_s: float = PERIOD_S) -> None:
        """Store `read`, which returns the document of `/swarm` and runs in a thread."""
        super().__init__()
        self._read = read
        self._period_s = period_s
        self._is_over = threading.Event()

    def compose(self) -> ComposeResult:
        with Scroller():
            yield TextLines(id="swarm")
        yield KeysLine(("arrows", "scroll"), ("Esc", "back"), ("q", "quit"))

    def on_mount(self) -> None:
        """Paint the screen first and read the document afterwards."""
        self.query_one("#swarm", TextLines).write([line("reading the swarm ...")])
        self.query_one(Scroller).focus()
        self.call_after_refresh(self._start)

    def on_unmount(self) -> None:
        self._is_over.set()

    def on_swarm_read(self, message: SwarmRead) -> None:
        tones = (
            next((TITLE_TONES[start] for start in TITLE_TONES if text.startswith(start)), Tone.PLAIN)
            for text in message.lines
        )
        shown = [line(Span(text, tone)) for text, tone in zip(message.lines, tones, strict=True)]
        self.query_one("#swarm", TextLines).write(shown)

    def _start(self) -> None:
        self.run_worker(self._watch, thread=True, name="swarm")

    def _watch(self) -> None:
        while not self._is_over.is_set():
            self.post_message(SwarmRead(self._look()))
            self._is_over.wait(self._period_s)

    def _look(self) -> list[str]:
        from ftis_node.swarm.overview import SwarmView, render_views

        try:
            return render_views([SwarmView.from_dict(one) for one in self._read()])
        except (FtisError, OSError, TypeError, ValueError) as error:  # no node, or a damaged document
            return [str(error)]


class SwarmApp(App[None]):
    """Application that shows only the screen of the swarm."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "ftis-node"
    CSS = "* { scrollbar-size: 1 1; }"

    def __init__(self, read: Callable[[], Any], *, period_s: float = PERIOD_S, once: bool = False) -> None:
        """Store `read`, which returns the document of `/swarm` and runs in a thread.

        `once` ends the application after the first paint.
        """
        super().__init__()
        self.theme = "ansi-dark"
        self._read = read
        self._period_s = period_s
        self._once = once

    def get_default_screen(self) -> Screen[None]:
        return SwarmScreen(self._read, period_s=self._period_s)

    def on_mount(self) -> None:
        """End after the first paint if `once` is set."""
        if self._once:
            self.call_after_refresh(self.exit)
