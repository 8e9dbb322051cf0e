"""Keep-alive notifications to systemd, which restarts the node if it gets none for `WatchdogSec`.

A notification is a datagram to the socket in `NOTIFY_SOCKET` (sd_notify(3)). Without that variable, nothing is sent.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ALIVE = b"WATCHDOG=1"


class ServiceManager:
    """Connection of a service to systemd."""

    def __init__(self, address: str, *, every_s: float) -> None:
        """`address` is a path, or an abstract name that begins with `@`."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._every_s = every_s
        self._notified_at: float | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ServiceManager | None:
        """Return the manager if systemd started this process and expects notifications; else None."""
        address, limit_us = environment.get("NOTIFY_SOCKET", ""), environment.get("WATCHDOG_USEC", "")
        if not address or not limit_us.isdecimal() or environment.get("WATCHDOG_PID") not in (None, str(os.getpid())):
            return None
        return cls(address, every_s=int(limit_us) / 1e6 / 4)

    def notify_alive(self, *, now: float) -> None:
        """Send a notification if one is due, four times per `WatchdogSec`. `now` is in seconds of a steady clock."""
        if self._notified_at is None or now - self._notified_at >= self._every_s:
            self._notified_at = now
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
                line.setblocking(False)  # if systemd is busy, drop this notification: the next one follows soon
                line.sendto(ALIVE, self._address)
