"""Byte counts as readable text."""

from __future__ import annotations

GIB = 1 << 30
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size(num_bytes: float) -> str:
    """Return a byte count in decimal units: `1.5 GB`, `212 MB`."""
    for limit, unit in UNITS:
        if num_bytes >= limit:
            scaled = num_bytes / limit
            return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def in_gib(num_bytes: int) -> str:
    """Return a byte count in binary units: `1.50 GiB`."""
    return f"{num_bytes / GIB:.2f} GiB"
