from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.containers import VerticalScroll

if TYPE_CHECKING:
    from textual.binding import BindingType


class Scroller(VerticalScroll):
    """Scrolling container that also takes the keys of vi and less."""

    BINDINGS: ClassVar[list[BindingType]] = [("j", "scroll_down", "down"), ("k", "scroll_up", "up")]
