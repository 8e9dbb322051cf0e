"""Base of the screens above the main one, and the messages that threads send to screens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from textual.message import Message
from textual.screen import Screen

from ftis_node.dashboard.widgets import KeysLine, Scroller, TextLines

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from ftis_node.dashboard.app import DashboardApp
    from ftis_node.dashboard.buffer_reader import GroupDetail
    from ftis_node.dashboard.snapshot import NodeSnapshot
    from ftis_node.dashboard.view.spans import Line
    from ftis_node.replay.reader import GroupSummary


@dataclass
class NodeSeen(Message):
    snapshot: NodeSnapshot


@dataclass
class GroupsListed(Message):
    """Groups that a screen requested. `problem` is the reason why the list is empty."""

    groups: list[GroupSummary]
    problem: str = ""


@dataclass
class GroupOpened(Message):
    """Group that a screen requested; None if the buffer no longer has it."""

    group: GroupDetail | None
    problem: str = ""


@dataclass
class SwarmRead(Message):
    """Lines of the swarm's view, or the reason why they are missing."""

    lines: list[str]


class Page(Screen[None]):
    """Screen above the main one."""

    app: DashboardApp
    BINDINGS: ClassVar[list[BindingType]] = [("escape", "back", "back"), ("q", "app.quit", "quit")]

    def action_back(self) -> None:
        """Close this screen, or the application if no other screen is left.

        Escape may be pressed again before the screen is closed; that has no effect.
        """
        if not self.is_current:
            return
        if len(self.app.screen_stack) > 1:
            self.app.pop_screen()
        else:
            self.app.exit()


class TextPage(Page):
    """Page with one text that scrolls, and its keys."""

    KEYS: ClassVar[tuple[tuple[str, str], ...]] = ()
    WRAPS = True

    def compose(self) -> ComposeResult:
        with Scroller():
            yield TextLines(id="text", wraps=self.WRAPS)
        yield KeysLine(("arrows", "scroll"), *self.KEYS, ("Esc", "back"), ("q", "quit"))

    def write(self, lines: Iterable[Line]) -> None:
        self.query_one("#text", TextLines).write(lines)
