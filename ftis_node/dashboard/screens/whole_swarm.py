"""Screen of the whole swarm: a row for each peer, and who learns from whom; updated regularly."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ftis_node.dashboard.context import SwarmRead, TextPage
from ftis_node.dashboard.view.spans import Span, Tone, line
from ftis_node.errors import FtisError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PERIOD_S = 5.0
TITLE_TONES = {"run ": Tone.STRONG, "name ": Tone.FAINT, "who learns": Tone.STRONG}


class SwarmScreen(TextPage):
    """Screen with one text that scrolls both ways."""

    DEFAULT_CSS = "SwarmScreen TextLines { width: auto; }"
    WRAPS = False

    def __init__(self, read: Callable[[], Any]) -> None:
        """Store `read`, which returns the document of `/swarm` and runs in a thread."""
        super().__init__()
        self._read = read
        self._is_over = threading.Event()

    def on_mount(self) -> None:
        self.write([line("reading the swarm ...")])
        self.call_after_refresh(self.run_worker, self._watch, thread=True, name="swarm")

    def on_unmount(self) -> None:
        self._is_over.set()

    def on_swarm_read(self, message: SwarmRead) -> None:
        self.write(line(Span(text, _tone(text))) for text in message.lines)

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
