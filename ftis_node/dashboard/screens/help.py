"""Screen of keys, terms and current problems."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftis_node.dashboard.screens.page import Page
from ftis_node.dashboard.view.help import help_lines
from ftis_node.dashboard.widgets.keys_line import KeysLine
from ftis_node.dashboard.widgets.text_lines import Scroller, TextLines

if TYPE_CHECKING:
    from textual.app import ComposeResult


class HelpScreen(Page):
    """Screen with one text that scrolls."""

    def compose(self) -> ComposeResult:
        with Scroller():
            yield TextLines(id="help", wraps=True)
        yield KeysLine(("arrows", "scroll"), ("Esc", "back"), ("q", "quit"))

    def on_mount(self) -> None:
        self.query_one("#help", TextLines).write(help_lines(self.app.snapshot))
        self.query_one(Scroller).focus()
