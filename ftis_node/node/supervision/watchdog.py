"""Watchdog of the event loop: a beat in the loop, every half second.

The beat measures its delay and notifies systemd.
A thread counts its own waits since the last beat. If they add up to `blocked_s`, the loop is blocked:
faulthandler writes the stacks to stderr, and the process ends with exit code 1. The thread counts nothing
while the machine sleeps or the process is stopped (SIGSTOP, Ctrl-Z), so a resumed node continues.

A notification is a datagram to the socket in `NOTIFY_SOCKET` (sd_notify(3)).
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from ftis_node.telemetry.events import EventLog

log = logging.getLogger(__name__)
BEAT_S = 0.5
LAG_WINDOW_S = 60.0
ALIVE = b"WATCHDOG=1"
STDERR = 2  # `sys.stderr` may be an object without a file descriptor


def service_manager(environment: Mapping[str, str] = os.environ) -> tuple[str, float] | None:
    """Return the socket of systemd and the seconds between notifications; None if it expects none of this process."""
    address, limit_us = environment.get("NOTIFY_SOCKET", ""), environment.get("WATCHDOG_USEC", "")
    if not address or not limit_us.isdecimal() or environment.get("WATCHDOG_PID") not in (None, str(os.getpid())):
        return None
    socket_name = f"\0{address[1:]}" if address.startswith("@") else address  # an abstract name, or a path
    return socket_name, int(limit_us) / 1e6 / 4


class Watchdog:
    """Watchdog of one event loop: use `with watchdog.watching():` in that loop.

    A block of `warn_s` seconds or more is logged when it ends, if `events` is set; one of `blocked_s` ends the process.
    `events` is set while a node runs. Before that, imports of large libraries block the loop.
    """

    def __init__(
        self, *, warn_s: float = 10.0, blocked_s: float = 600.0, manager: tuple[str, float] | None = None
    ) -> None:
        """`manager` is the result of `service_manager`."""
        self.lag_s = deque[float](maxlen=round(LAG_WINDOW_S / BEAT_S))  # delays of the beats of the last minute
        self.events: EventLog | None = None
        self.has_fault = False
        self._warn_s, self._blocked_s = warn_s, blocked_s
        self._manager = manager
        self._num_beats, self._notifies_at = 0, 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        self._next_beat: asyncio.Handle = loop.call_soon(self._beat, loop, loop.time())
        ended = threading.Event()
        threading.Thread(target=self._end_if_blocked, args=(ended,), name="watchdog", daemon=True).start()
        try:
            yield
        finally:
            self._next_beat.cancel()
            ended.set()

    def _end_if_blocked(self, ended: threading.Event) -> None:
        seen, silent_s = 0, 0.0
        while not ended.wait(BEAT_S):
            silent_s = 0.0 if seen != self._num_beats else silent_s + BEAT_S
            seen = self._num_beats
            if silent_s >= self._blocked_s:
                faulthandler.dump_traceback(STDERR)
                os._exit(1)

    def log_fault(self, where: str, error: BaseException) -> None:
        """Record in the event log an unhandled error, which ends this node (`telemetry/faults.py`)."""
        self.has_fault = True
        self._write("failed", where=where, error=f"{type(error).__name__}: {error}")

    def _beat(self, loop: asyncio.AbstractEventLoop, due_at: float) -> None:
        now = loop.time()
        late_s = now - due_at
        self._num_beats += 1
        self._next_beat = loop.call_at(now + BEAT_S, self._beat, loop, now + BEAT_S)
        self.lag_s.append(max(0.0, late_s))
        if late_s >= self._warn_s and self.events is not None:
            log.warning("the event loop was blocked, or this process stopped, for %.0f s", late_s)
            self._write("loop_blocked", for_s=round(late_s, 1))
        if self._manager is not None and now >= self._notifies_at:
            address, every_s = self._manager
            self._notifies_at = now + every_s
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
                line.setblocking(False)  # if systemd is busy, drop this notification: the next one follows soon
                line.sendto(ALIVE, address)

    def _write(self, event: str, **fields: str | float) -> None:
        if self.events is not None:
            self.events.write(event, **fields)
