"""Bases of the application and of the screens above the main one, and the messages between them. Imports no screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from textual.app import App
from textual.message import Message
from textual.screen import Screen

from ftis_node.dashboard.widgets import KeysLine, Scroller, TextLines
from ftis_node.errors import FtisError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from ftis_node.config.home import Home
    from ftis_node.dashboard.buffer_reader import GroupDetail
    from ftis_node.dashboard.snapshot import NodeSnapshot
    from ftis_node.dashboard.view.spans import Line
    from ftis_node.models.tokenizer import Decoder
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


class DashboardContext(App[None]):
    """Application with the newest snapshot of the node and access to its buffer."""

    def __init__(self, home: Home) -> None:
        super().__init__()
        self._home = home
        self._decoder: Decoder | None = None
        self.is_leaving = False
        self.snapshot: NodeSnapshot | None = None  # None before the first snapshot

    def open_page(self, page: Screen[None]) -> None:
        if not self.is_leaving:
            self.push_screen(page)

    def peer_names(self) -> dict[str, str]:
        peers = () if self.snapshot is None else self.snapshot.peers
        return {row["peer_id"]: str(row.get("name") or "") for row in peers}

    def load_groups(self, asker: Screen[None], *, sender: str | None = None) -> None:
        """Read the newest groups in a thread, then send `asker` a GroupsListed."""

        def read() -> None:
            import sqlite3

            from ftis_node.dashboard.buffer_reader import list_groups

            try:
                asker.post_message(GroupsListed(list_groups(self._home, sender=sender)))
            except (FtisError, sqlite3.Error) as error:
                asker.post_message(GroupsListed([], str(error)))

        self.run_worker(read, thread=True, group="buffer")

    def load_group(self, asker: Screen[None], group_id: str) -> None:
        """Read one group in a thread, then send `asker` a GroupOpened."""

        def read() -> None:
            import sqlite3

            from ftis_node.dashboard.buffer_reader import read_group
            from ftis_node.models.tokenizer import Decoder

            self._decoder = self._decoder or Decoder(self._home)
            try:
                asker.post_message(GroupOpened(read_group(self._home, group_id, self._decoder)))
            except (FtisError, sqlite3.Error) as error:
                asker.post_message(GroupOpened(None, str(error)))

        self.run_worker(read, thread=True, group="buffer")


class Page(Screen[None]):
    """Screen above the main one."""

    app: DashboardContext
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
