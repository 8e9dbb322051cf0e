"""Progress of long work: the worker reports it, and the caller chooses how to show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

# Takes the fraction done, from 0 to 1 (None: unknown), and a text about the current work ("": the work has ended).
OnProgress: TypeAlias = Callable[[float | None, str], None]


def unwatched(fraction: float | None, what: str) -> None:
    """Discard progress."""
