"""What `doctor` finds: one record for every check, so that people and programs read the same list."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One result: `level` is ok, note or problem; `advice` is empty where nothing need be done.

    `num_bytes` is set where the finding is an amount of memory.
    """

    check: str
    level: str
    finding: str
    advice: str = ""
    num_bytes: int | None = None


def in_gib(num_bytes: int) -> str:
    """As people read it."""
    return f"{num_bytes / GIB:.2f} GiB"
