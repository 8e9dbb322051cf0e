"""Base of the applications: the interface that their screens use. It imports no screen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual.app import App
from textual.message import Message
from textual.screen import Screen

from ftis_node.errors import FtisError

if TYPE_CHECKING:
    from textual.binding import BindingType

    from ftis_node.config.home import Home
    from ftis_node.dashboard.buffer_reader import GroupDetail
    from ftis_node.dashboard.snapshot import NodeSnapshot
    from ftis_node.models.tokenizer import Decoder
    from ftis_node.replay.reader import GroupSummary


@dataclass
class NodeSeen(Message):
    """New snapshot of the node."""

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


class DashboardContext(App[None]):
    """Application with the newest snapshot of the node and access to its buffer."""

    def __init__(self, home: Home) -> None:
        super().__init__()
        self._home = home
        self._decoder: Decoder | None = None
        self.is_leaving = False
        self.snapshot: NodeSnapshot | None = None  # None before the first snapshot

    def open_page(self, page: Screen[None]) -> None:
        """Show a page above the current screen."""
        if not self.is_leaving:
            self.push_screen(page)

    def peer_names(self) -> dict[str, str]:
        """Return the names that peers announce, by peer id."""
        peers = () if self.snapshot is None else self.snapshot.peers
        return {row["peer_id"]: str(row.get("name") or "") for row in peers}

    def load_groups(self, asker: Screen[None], *, sender: str | None = None) -> None:
        """Read the newest groups in a thread, then send `asker` a GroupsListed."""
        self.run_worker(partial(self._list, asker, sender), thread=True, group="buffer")

    def _list(self, asker: Screen[None], sender: str | None) -> None:
        import sqlite3

        from ftis_node.dashboard.buffer_reader import list_groups

        try:
            asker.post_message(GroupsListed(list_groups(self._home, sender=sender)))
        except (FtisError, sqlite3.Error) as error:
            asker.post_message(GroupsListed([], str(error)))

    def load_group(self, asker: Screen[None], group_id: str) -> None:
        """Read one group in a thread, then send `asker` a GroupOpened."""
        self.run_worker(partial(self._open, asker, group_id), thread=True, group="buffer")

    def _open(self, asker: Screen[None], group_id: str) -> None:
        import sqlite3

        from ftis_node.dashboard.buffer_reader import read_group
        from ftis_node.models.tokenizer import Decoder

        if self._decoder is None:
            self._decoder = Decoder(self._home)
        try:
            asker.post_message(GroupOpened(read_group(self._home, group_id, self._decoder)))
        except (FtisError, sqlite3.Error) as error:
            asker.post_message(GroupOpened(None, str(error)))
