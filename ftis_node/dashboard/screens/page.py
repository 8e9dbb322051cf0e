"""Base of all screens except the main one; Escape closes the top one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.screen import Screen

if TYPE_CHECKING:
    from textual.binding import BindingType

    from ftis_node.dashboard.context import DashboardContext


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
