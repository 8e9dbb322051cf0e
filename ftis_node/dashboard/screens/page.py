"""What all screens but the main one share: they lie above it, and Escape closes the one on top."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.screen import Screen

if TYPE_CHECKING:
    from textual.binding import BindingType

    from ftis_node.dashboard.context import DashboardContext


class Page(Screen[None]):
    """A screen above the main one."""

    app: DashboardContext
    BINDINGS: ClassVar[list[BindingType]] = [("escape", "back", "back"), ("q", "app.quit", "quit")]

    def action_back(self) -> None:
        """Closes this screen; once, however often Escape was pressed before it was gone."""
        if self.is_current:
            self.app.pop_screen()
