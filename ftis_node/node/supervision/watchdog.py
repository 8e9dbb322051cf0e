"""Watchdog of the event loop and its tasks: reports blocked code and stuck tasks with their stacks.

    the loop  --beat, every half second--> count, lag, the task monitor (task_monitor.py), systemd's watchdog
    a thread  --polls the count----------> no beat for `event_loop_stall_warn_s`: logs the stack of the blocking code
                                           no beat for `event_loop_stall_exit_s`: ends the process with exit code 1

The thread counts its polls and reads no clock. So a suspended process, or a machine without CPU time, causes one poll
without a beat, not a blocked loop. The watchdog writes log lines from another thread. The loop may be blocked in a log
call, and then a thread that waits for the same lock could not end the process.

Code that holds the GIL also stops this thread. systemd detects that: it restarts the node if it gets no notification
for `WatchdogSec`. A notification is a datagram to the socket in `NOTIFY_SOCKET` (sd_notify(3)).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftis_node.node.supervision.task_monitor import TaskMonitor, short_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ftis_node.config.observe import ObserveSection
    from ftis_node.telemetry.events import EventLog

log = logging.getLogger(__name__)
BEAT_S = 0.5
LAG_WINDOW_S = 60.0
EXIT_CODE = 1
NUM_FRAMES = 12  # innermost frames of a stack to log
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


@dataclass(slots=True)
class LoopDelay:
    """Delay of the event loop's beats over the last minute, in seconds."""

    _late_s: deque[float] = field(default_factory=lambda: deque(maxlen=round(LAG_WINDOW_S / BEAT_S)))

    def note(self, late_s: float) -> None:
        self._late_s.append(max(0.0, late_s))

    @property
    def mean_s(self) -> float | None:
        return sum(self._late_s) / len(self._late_s) if self._late_s else None

    @property
    def longest_s(self) -> float | None:
        return max(self._late_s, default=None)


class Watchdog:
    """Watchdog of one event loop: use `with watchdog.watching():` in that loop.

    `events` is set while the node runs. Before that, imports of large libraries block the loop, and no event is
    written.
    """

    def __init__(
        self,
        settings: ObserveSection,
        *,
        manager: ServiceManager | None = None,
        end_process: Callable[[int], object] = os._exit,
        poll_interval_s: float = BEAT_S,
    ) -> None:
        """If the loop stays blocked, the thread calls `end_process` with the exit code."""
        self.board = TaskMonitor(limit_s=settings.task_stuck_s)
        self.lag = LoopDelay()
        self.events: EventLog | None = None
        self.has_fault = False
        self._settings = settings
        self._manager = manager
        self._end_process = end_process
        self._poll_interval_s = poll_interval_s
        self._num_beats = 0
        self._blocked_since: float | None = None  # the thread sets it, the loop resets it
        self._is_over = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the running loop, and monitor the tasks that are created inside the block."""
        loop = asyncio.get_running_loop()
        self.board.install()
        beating = loop.call_soon(self._beat, loop, loop.time())
        thread = threading.Thread(target=self._watch, args=(threading.get_ident(),), name="watchdog", daemon=True)
        thread.start()
        self._cancel_beat = beating.cancel
        try:
            yield
        finally:
            self._is_over.set()
            self._cancel_beat()

    def log_fault(self, where: str, error: BaseException) -> None:
        """Record in the event log an unhandled error, which ends this node (`telemetry/faults.py`)."""
        self.has_fault = True
        self._write("failed", where=where, error=f"{type(error).__name__}: {error}")

    def _beat(self, loop: asyncio.AbstractEventLoop, due_at: float) -> None:
        now = loop.time()
        self._num_beats += 1
        self.lag.note(now - due_at)
        self._cancel_beat = loop.call_at(now + BEAT_S, self._beat, loop, now + BEAT_S).cancel
        self.board.tick(now - due_at + BEAT_S)
        if self._blocked_since is not None:
            for_s, self._blocked_since = time.monotonic() - self._blocked_since, None
            log.warning("the event loop responds again, after %.0f s", for_s)
            self._write("loop_turns_again", for_s=round(for_s, 1))
        self._report_changes()
        if self._manager is not None and not self.board.stuck():
            self._manager.notify_alive(now=now)

    def _report_changes(self) -> None:
        news, again = self.board.changes()
        for stuck in news:
            log.error("%s; its stack is %s", stuck, " > ".join(stuck.stack))
            self._write(
                "loop_stuck", loop=stuck.name, waits_for=stuck.waits_for, for_s=round(stuck.for_s), stack=stuck.stack
            )
        for name in again:
            log.warning("the %s loop makes progress again", name)
            self._write("loop_goes_on", loop=name)

    def _watch(self, loop_thread: int) -> None:
        num_still, seen, reported_at = 0, -1, self._settings.event_loop_stall_warn_s
        while not self._is_over.wait(self._poll_interval_s):
            if self._num_beats != seen:
                num_still, seen, reported_at = 0, self._num_beats, self._settings.event_loop_stall_warn_s
                continue
            num_still += 1
            still_s = num_still * self._poll_interval_s
            if still_s >= self._settings.event_loop_stall_exit_s:
                self._in_thread(self._give_up, still_s).join(self._settings.event_loop_stall_warn_s)
                self._end_process(EXIT_CODE)
                return
            if still_s >= reported_at and self.events is not None:
                reported_at *= 2
                self._blocked_since = self._blocked_since or time.monotonic() - still_s
                self._in_thread(self._report_blocked, still_s, thread_stack(loop_thread))

    def _in_thread(self, work: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, name="watchdog-reports", daemon=True)
        thread.start()
        return thread

    def _report_blocked(self, for_s: float, stack: list[str]) -> None:
        log.error("the event loop has been blocked for %.0f s: its stack is %s", for_s, " > ".join(stack))
        self._write("loop_blocked", for_s=round(for_s, 1), stack=stack)

    def _give_up(self, for_s: float) -> None:
        log.critical("the event loop was blocked for %.0f s (observe.event_loop_stall_exit_s): this node ends", for_s)
        self._write("failed", where="the event loop", error=f"blocked for {for_s:.0f} s")

    def _write(self, event: str, **fields: str | float | list[str]) -> None:
        if self.events is not None:
            self.events.write(event, **fields)


def thread_stack(ident: int) -> list[str]:
    """Return the stack of a thread, the innermost frame last: `node/loops/intake.py:97 _judge_all`."""
    frame = sys._current_frames().get(ident)
    frames = traceback.extract_stack(frame) if frame is not None else []
    places = [f"{short_path(each.filename)}:{each.lineno} {each.name}" for each in frames]
    began = [at for at, place in enumerate(places, start=1) if place.startswith("asyncio/events.py")]
    return places[began[-1] if began else 0 :][-NUM_FRAMES:]
