"""Screen of one group: prompt, completions, log-probs, rewards, validation, use."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ftis_node.dashboard.screens.page import Page
from ftis_node.dashboard.view.groups import group_lines
from ftis_node.dashboard.view.spans import Span, Tone, line, sanitized
from ftis_node.dashboard.widgets.keys_line import KeysLine
from ftis_node.dashboard.widgets.scroller import Scroller
from ftis_node.dashboard.widgets.text_lines import TextLines

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from ftis_node.dashboard.buffer_reader import GroupDetail
    from ftis_node.dashboard.messages import GroupOpened


class GroupScreen(Page):
    """Screen of one group; `l` shows the log-prob of each token."""

    BINDINGS: ClassVar[list[BindingType]] = [("l", "toggle_tokens", "log-probs of tokens")]

    def __init__(self, group_id: str) -> None:
        super().__init__()
        self.group_id = group_id
        self._group: GroupDetail | None = None
        self._with_tokens = False

    def compose(self) -> ComposeResult:
        with Scroller(id="scroll"):
            yield TextLines(id="group", wraps=True)
        yield KeysLine(("arrows", "scroll"), ("l", "log-probs of all tokens"), ("Esc", "back"), ("q", "quit"))

    def on_mount(self) -> None:
        """Request the group."""
        self.query_one("#group", TextLines).write([line(Span(f"reading group {self.group_id}", Tone.FAINT))])
        self.query_one(Scroller).focus()
        self.app.load_group(self, self.group_id)

    def on_group_opened(self, message: GroupOpened) -> None:
        self._group = message.group
        if message.group is None:
            words = sanitized(message.problem) or "the buffer no longer has this group: newer ones replaced it"
            self.query_one("#group", TextLines).write([line(Span(words, Tone.WARN))])
        else:
            self._write()

    def action_toggle_tokens(self) -> None:
        """Show or hide the log-prob of each token."""
        self._with_tokens = not self._with_tokens
        self._write()

    def _write(self) -> None:
        if self._group is not None:
            self.query_one("#group", TextLines).write(group_lines(self._group, with_tokens=self._with_tokens))
