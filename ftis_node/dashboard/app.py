"""The application: the watcher's thread, the screens, and the threads that read the buffer when asked."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Protocol

from textual.app import App
from textual.events import InputEvent

from ftis_node.dashboard.messages import GroupOpened, GroupsListed, NodeSeen
from ftis_node.dashboard.screens.main import MainScreen
from ftis_node.errors import FtisError

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.events import Event
    from textual.screen import Screen

    from ftis_node.config.home import Home
    from ftis_node.dashboard.screens.page import Page
    from ftis_node.dashboard.snapshot import Reading
    from ftis_node.models.decoder import Decoder

PERIOD_S = 1.0


class Looker(Protocol):
    """What looks at the node; the watcher does."""

    def look(self, *, with_history: bool = True) -> Reading:
        """The node as it is now."""
        ...


class DashboardApp(App[None]):
    """Paints first and reads after; `reading` is the newest look at the node, None before the first."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "ftis-node"
    CSS = "* { scrollbar-size: 1 1; }"

    def __init__(
        self, home: Home, open_watcher: Callable[[], Looker], *, period_s: float = PERIOD_S, once: bool = False
    ) -> None:
        """`open_watcher` is called in the watcher's thread; `once`: ends after the first paint."""
        super().__init__()
        self.theme = "ansi-dark"
        self._home = home
        self._open_watcher = open_watcher
        self._period_s = period_s
        self._once = once
        self._is_over = threading.Event()
        self._is_leaving = False
        self._decoder: Decoder | None = None
        self.reading: Reading | None = None

    def get_default_screen(self) -> Screen[None]:
        """The main screen."""
        return MainScreen(str(self._home.root))

    def on_mount(self) -> None:
        """Starts reading when the first frame is out."""
        self.call_after_refresh(self.exit if self._once else self._start)

    def on_unmount(self) -> None:
        """Ends the watcher's thread."""
        self._is_over.set()

    def _start(self) -> None:
        self.run_worker(self._watch, thread=True, group="watcher", name="watcher")

    def _watch(self) -> None:
        watcher = self._open_watcher()
        self.post_message(NodeSeen(watcher.look(with_history=False)))
        while not self._is_over.is_set():
            self.post_message(NodeSeen(watcher.look()))
            self._is_over.wait(self._period_s)

    async def action_quit(self) -> None:
        """Ends the dashboard. Keys that were pressed after it are for nobody: there will be no screen to take them."""
        self._is_leaving = True
        self.exit()

    async def on_event(self, event: Event) -> None:
        """Every event that the application itself gets."""
        if not (self._is_leaving and isinstance(event, InputEvent)):
            await super().on_event(event)

    def open_page(self, page: Page) -> None:
        """Shows a page above the screen that is shown now."""
        if not self._is_leaving:
            self.push_screen(page)

    def on_node_seen(self, message: NodeSeen) -> None:
        """Every open screen that shows the node is written anew; one that is still being opened reads it itself."""
        self.reading = message.reading
        if not self.is_running:
            return
        for screen in self.screen_stack:
            if screen.is_mounted and (show := getattr(screen, "show", None)) is not None:
                show(message.reading)

    def peer_names(self) -> dict[str, str]:
        """What peers call themselves, by their ids."""
        peers = () if self.reading is None else self.reading.peers
        return {row["peer_id"]: str(row.get("name") or "") for row in peers}

    def load_groups(self, asker: Screen[None], *, sender: str | None = None) -> None:
        """Reads the newest groups in a thread; `asker` gets GroupsListed."""
        self.run_worker(partial(self._list, asker, sender), thread=True, group="buffer")

    def _list(self, asker: Screen[None], sender: str | None) -> None:
        import sqlite3

        from ftis_node.dashboard.buffer_reader import list_groups

        try:
            asker.post_message(GroupsListed(list_groups(self._home, sender=sender)))
        except (FtisError, sqlite3.Error) as error:
            asker.post_message(GroupsListed([], str(error)))

    def load_group(self, asker: Screen[None], group_id: str) -> None:
        """Reads one group in a thread; `asker` gets GroupOpened."""
        self.run_worker(partial(self._open, asker, group_id), thread=True, group="buffer")

    def _open(self, asker: Screen[None], group_id: str) -> None:
        import sqlite3

        from ftis_node.dashboard.buffer_reader import open_group
        from ftis_node.models.decoder import Decoder

        if self._decoder is None:
            self._decoder = Decoder(self._home)
        try:
            asker.post_message(GroupOpened(open_group(self._home, group_id, self._decoder)))
        except (FtisError, sqlite3.Error) as error:
            asker.post_message(GroupOpened(None, str(error)))

    def open_group(self, group_id: str | None) -> None:
        """Shows one group."""
        from ftis_node.dashboard.screens.group import GroupScreen

        if group_id is not None:
            self.open_page(GroupScreen(group_id))

    def action_show_groups(self) -> None:
        """Shows the newest groups."""
        from ftis_node.dashboard.screens.groups import GroupsScreen

        self.open_page(GroupsScreen())

    def action_show_events(self) -> None:
        """Shows the event trail."""
        from ftis_node.dashboard.screens.events import EventsScreen

        self.open_page(EventsScreen())

    def action_show_help(self) -> None:
        """Shows keys and words."""
        from ftis_node.dashboard.screens.help import HelpScreen

        self.open_page(HelpScreen())
