"""How long work tells of itself: whoever does it says how far it is, whoever started it chooses how to show that."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

# How much is done, from 0 to 1, or None where nobody can know; and what is being done. No text: nothing is, any more.
OnProgress: TypeAlias = Callable[[float | None, str], None]


def unwatched(fraction: float | None, what: str) -> None:
    """Nobody looks."""
