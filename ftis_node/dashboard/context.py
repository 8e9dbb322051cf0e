"""Bases of the application and of the screens above the main one, and the messages between them. Imports no screen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.message import Message
from textual.screen import Screen

from ftis_node.config.home import Home
from ftis_node.dashboard.widgets import Keys, Scroller, TextLines
from ftis_node.errors import FtisError
from ftis_node.telemetry.terminal_text import printable
from ftis_node.view.peers import peer_names
from ftis_node.view.snapshot import NodeSnapshot
from ftis_node.view.spans import Line

if TYPE_CHECKING:
    from ftis_node.replay.group_history import GroupHistory


@dataclass
class NodeSeen(Message):
    snapshot: NodeSnapshot


@dataclass
class Loaded(Message):
    """What a page has read in a thread; None with the reason if that failed."""

    value: Any
    problem: str = ""


class DashboardContext(App[None]):
    def __init__(self, home: Home) -> None:
        super().__init__()
        self.home = home
        self.is_leaving = False
        self.snapshot: NodeSnapshot | None = None  # None before the first snapshot

    @cached_property
    def read_group(self) -> Callable[[str], GroupHistory | None]:
        """Function that returns the history of a group by its id. It opens the tokenizer and each task once."""
        from ftis_node.models.decoder import Decoder
        from ftis_node.replay.group_history import PromptResolver, read_group_history

        return partial(read_group_history, self.home, decoder=Decoder(self.home), prompts=PromptResolver(self.home))

    def open_page(self, page: Screen[None]) -> None:
        if not self.is_leaving:
            self.push_screen(page)

    def peer_names(self) -> dict[str, str]:
        return {} if self.snapshot is None else peer_names(self.snapshot.peers, self.snapshot.status.node)


class Page(Screen[None]):
    """Screen above the main one."""

    app: DashboardContext
    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape", "back", "back"),
        ("question_mark", "app.show_help", "help"),
        ("q", "app.quit", "quit"),
    ]

    def load(self, read: Callable[[], Any]) -> None:
        """Call `read` in a thread, which then sends this page a Loaded."""

        def run() -> None:
            import sqlite3

            try:
                loaded = Loaded(read())
            except (FtisError, OSError, TypeError, ValueError, sqlite3.Error) as error:  # also a damaged document
                loaded = Loaded(None, printable(str(error)))
            self.post_message(loaded)

        self.app.run_worker(run, thread=True, group="load")

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
    def compose(self) -> ComposeResult:
        with Scroller():
            yield TextLines(id="text", wraps=True)
        yield Keys()

    def write(self, lines: Iterable[Line]) -> None:
        self.query_one("#text", TextLines).write(lines)
