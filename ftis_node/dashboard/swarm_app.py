"""Application of `dashboard --swarm`: the view of a whole swarm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.app import App

from ftis_node.dashboard.screens.whole_swarm import PERIOD_S, SwarmScreen

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from textual.screen import Screen


class SwarmApp(App[None]):
    """Application that shows only the screen of the swarm."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "ftis-node"
    CSS = "* { scrollbar-size: 1 1; }"

    def __init__(self, read: Callable[[], Any], *, period_s: float = PERIOD_S, once: bool = False) -> None:
        """Store `read`, which returns the document of `/swarm` and runs in a thread.

        `once` ends the application after the first paint.
        """
        super().__init__()
        self.theme = "ansi-dark"
        self._read = read
        self._period_s = period_s
        self._once = once

    def get_default_screen(self) -> Screen[None]:
        return SwarmScreen(self._read, period_s=self._period_s)

    def on_mount(self) -> None:
        """End after the first paint if `once` is set."""
        if self._once:
            self.call_after_refresh(self.exit)
