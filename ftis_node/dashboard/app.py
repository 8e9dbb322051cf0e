"""Application of the dashboard: the watcher's thread, and the keys that open screens."""

from __future__ import annotations

import threading

from textual.events import Event, InputEvent
from textual.screen import Screen

from ftis_node.config.home import Home
from ftis_node.dashboard.context import DashboardContext, NodeSeen
from ftis_node.dashboard.screens.groups import GroupsScreen
from ftis_node.dashboard.screens.main import MainScreen

PERIOD_S = 2.0


class DashboardApp(DashboardContext):
    """Application that paints first and reads the node afterwards."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "ftis-node"
    CSS = "* { scrollbar-size: 1 1; }"

    def __init__(
        self,
        home: Home,
        *,
        is_swarm: bool = False,
        has_curves: bool = True,
        period_s: float = PERIOD_S,
        once: bool = False,
    ) -> None:
        """`is_swarm` shows only the whole swarm. `once` ends the application after the first paint.

        A browser has its own curves, so it needs none here.
        """
        super().__init__(home)
        self.theme = "ansi-dark"
        self._is_swarm = is_swarm
        self._has_curves = has_curves
        self._period_s = period_s
        self._once = once
        self._is_over = threading.Event()

    def get_default_screen(self) -> Screen[None]:
        return self._swarm_screen() if self._is_swarm else MainScreen(classes="" if self._has_curves else "-no-curves")

    def on_mount(self) -> None:
        if self._once:
            self.call_after_refresh(self.exit)
        elif not self._is_swarm:
            self.call_after_refresh(self.run_worker, self._watch, thread=True, group="watcher", name="watcher")

    def on_unmount(self) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        from ftis_node.dashboard.watcher import Watcher

        watcher = Watcher(self.home)
        self.post_message(NodeSeen(watcher.poll(with_history=False)))
        while not self._is_over.is_set():
            self.post_message(NodeSeen(watcher.poll()))
            self._is_over.wait(self._period_s)

    async def action_quit(self) -> None:
        """End the dashboard. `on_event` drops the keys that were pressed after `q`: no screen is left to take them."""
        self.is_leaving = True
        self.exit()

    async def on_event(self, event: Event) -> None:
        if not (self.is_leaving and isinstance(event, InputEvent)):
            await super().on_event(event)

    def on_node_seen(self, message: NodeSeen) -> None:
        """Update each open screen that shows the node. A screen that is still opening reads `snapshot` itself."""
        self.snapshot = message.snapshot
        if not self.is_running:
            return
        for screen in self.screen_stack:
            if screen.is_mounted and (show := getattr(screen, "show", None)) is not None:
                show(message.snapshot)

    def action_show_groups(self) -> None:
        self.open_page(GroupsScreen())

    def action_show_events(self) -> None:
        from ftis_node.dashboard.screens.events import EventsScreen

        self.open_page(EventsScreen())

    def action_show_swarm(self) -> None:
        self.open_page(self._swarm_screen())

    def _swarm_screen(self) -> Screen[None]:
        from ftis_node.dashboard.screens.whole_swarm import SwarmScreen

        return SwarmScreen()

    def action_show_help(self) -> None:
        from ftis_node.dashboard.screens.help import HelpScreen

        self.open_page(HelpScreen())
