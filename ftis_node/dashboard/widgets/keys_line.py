"""Keys of a screen, at its bottom. Textual's own footer stays empty in a browser page without focus."""

from __future__ import annotations

from ftis_node.dashboard.view.spans import Span, Tone, line
from ftis_node.dashboard.widgets.text_lines import TextLines


class KeysLine(TextLines):
    """One line of keys and what they do."""

    DEFAULT_CSS = "KeysLine { dock: bottom; height: 1; }"

    def __init__(self, *keys: tuple[str, str]) -> None:
        super().__init__(id="keys")
        self._keys = keys

    def on_mount(self) -> None:
        spans = (part for key, what in self._keys for part in (Span(f" {key}", Tone.STRONG), f" {what} "))
        self.write([line(*spans)])
