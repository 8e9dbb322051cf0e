"""Progress of long work: the worker reports how far it is, and the caller chooses how to show that."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

# How much is done, from 0 to 1, or None if nobody can know; and what is being done. No text: nothing is, any more.
OnProgress: TypeAlias = Callable[[float | None, str], None]


def unwatched(fraction: float | None, what: str) -> None:
    """Discard progress."""
