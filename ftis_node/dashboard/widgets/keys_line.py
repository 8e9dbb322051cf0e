"""Keys of a screen, in its bottom line. A click presses one.

Textual's own footer stays empty in a browser page without focus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.dashboard.view.spans import Span, Tone, line
from ftis_node.dashboard.widgets.text_lines import TextLines

if TYPE_CHECKING:
    from textual.events import Click

KEY_NAMES = {"Enter": "enter", "Esc": "escape", "?": "question_mark", "/": "slash"}


class KeysLine(TextLines):
    """One line of keys and their actions."""

    DEFAULT_CSS = "KeysLine { dock: bottom; height: 1; }"

    def __init__(self, *keys: tuple[str, str]) -> None:
        super().__init__(id="keys")
        self._keys = keys

    def on_mount(self) -> None:
        spans = (part for key, what in self._keys for part in (Span(f" {key}", Tone.STRONG), f" {what} "))
        self.write([line(*spans)])

    def on_click(self, event: Click) -> None:
        """Press the key under the mouse, for a phone without a keyboard."""
        right = 0
        for key, what in self._keys:
            right += len(f" {key} {what} ")
            if event.x < right:
                self.app.simulate_key(KEY_NAMES.get(key, key))
                return
