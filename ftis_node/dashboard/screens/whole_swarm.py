"""Screen of the whole swarm: a row for each peer, and who learns from whom; updated regularly."""

from __future__ import annotations

from ftis_node.dashboard.context import Loaded, TextPage
from ftis_node.view.spans import Span, Tone, line

PERIOD_S = 5.0
TITLE_TONES = {"run ": Tone.STRONG, "name ": Tone.FAINT, "who learns": Tone.STRONG}


class SwarmScreen(TextPage):
    DEFAULT_CSS = "SwarmScreen TextLines { width: auto; }"
    WRAPS = False

    def on_mount(self) -> None:
        self.write([line("reading the swarm ...")])
        self.call_after_refresh(self.load, self.read)

    def on_loaded(self, message: Loaded) -> None:
        lines = [message.problem] if message.value is None else message.value
        self.write(line(Span(text, _tone(text))) for text in lines)
        self.set_timer(PERIOD_S, lambda: self.load(self.read))

    def read(self) -> list[str]:
        from ftis_node.node.http_api.node_client import read_document
        from ftis_node.swarm.overview import SwarmView, render_views

        return render_views([SwarmView.from_dict(one) for one in read_document(self.app.home, "/swarm")])


def _tone(text: str) -> Tone:
    return next((tone for start, tone in TITLE_TONES.items() if text.startswith(start)), Tone.PLAIN)
