"""What really crosses between nodes on one machine: bytes counted at the loopback interface by the kernel."""

from __future__ import annotations

from pathlib import Path

COUNTERS = Path("/proc/net/dev")
LOOPBACK = "lo:"


def loopback_bytes() -> int | None:
    """Bytes received at the loopback interface since the machine started; None where the system does not tell.

    Every byte sent over loopback is received there once. Other programs' traffic counts too.
    """
    if not COUNTERS.exists():
        return None
    for line in COUNTERS.read_text().splitlines():
        name, *numbers = line.split()
        if name == LOOPBACK:
            return int(numbers[0])
    return None
