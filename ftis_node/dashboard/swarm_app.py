"""The application of `dashboard --swarm`: the view of a whole swarm, read again every few seconds."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, ClassVar

from textual.app import App
from textual.containers import VerticalScroll

from ftis_node.dashboard.view.spans import line
from ftis_node.dashboard.widgets.keys_line import KeysLine
from ftis_node.dashboard.widgets.text_lines import TextLines
from ftis_node.errors import FtisError
from ftis_node.swarm.overview.text import render_views
from ftis_node.swarm.overview.view import SwarmView

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from textual.app import ComposeResult
    from textual.binding import BindingType

PERIOD_S = 5.0


class SwarmApp(App[None]):
    """Application with one scrolling page of text."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "ftis-node"
    CSS = "* { scrollbar-size: 1 1; } TextLines { width: auto; }"
    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "quit"), ("escape", "quit", "quit")]

    def __init__(self, read: Callable[[], Any], *, period_s: float = PERIOD_S, once: bool = False) -> None:
        """`read` returns the document of `/swarm`, in a thread. `once` ends the application after the first paint."""
        super().__init__()
        self.theme = "ansi-dark"
        self._read = read
        self._period_s = period_s
        self._once = once
        self._is_over = threading.Event()

    def compose(self) -> ComposeResult:
        """Lay out the text and the keys."""
        with VerticalScroll():
            yield TextLines(id="swarm")
        yield KeysLine(("arrows", "scroll"), ("q", "quit"))

    def on_mount(self) -> None:
        """Paint first and read afterwards."""
        self.show(["reading the swarm ..."])
        self.query_one(VerticalScroll).focus()
        self.call_after_refresh(self.exit if self._once else self._start)

    def on_unmount(self) -> None:
        self._is_over.set()

    def show(self, lines: list[str]) -> None:
        """Replace the text."""
        self.query_one("#swarm", TextLines).write([line(text) for text in lines])

    def _start(self) -> None:
        self.run_worker(self._watch, thread=True, name="swarm")

    def _watch(self) -> None:
        while not self._is_over.is_set():
            lines = self._look()
            if not self._is_over.is_set():
                self.call_from_thread(self.show, lines)
            self._is_over.wait(self._period_s)

    def _look(self) -> list[str]:
        try:
            return render_views([SwarmView.from_dict(one) for one in self._read()])
        except (FtisError, OSError, TypeError, ValueError) as error:  # no node, or a damaged document
            return [str(error)]
