"""The failure detector of a worker, a pure state machine without clock or socket: heartbeats and ticks in, a verdict
out.

Silence is counted in ticks of the daemon's event loop, not by a clock. If the daemon itself was paused for a minute (a
suspended laptop, a debugger), it counts one tick without a heartbeat, not a dead worker.

The heartbeat of a worker. A separate thread sends it, so long tensor operations in the event loop do not delay it.

A heartbeat alone proves that the process lives, not that it makes progress. So each one has two counters: requests in
flight, and progress that handlers report. Requests in flight without progress for too long count as a hang, which
`liveness.py` detects in the daemon.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import zmq

from ftis_node.workers.wire import HEARTBEAT_IDENTITY, Heartbeat, pack

if TYPE_CHECKING:
    from types import TracebackType


class ActivityCounter:
    """Thread-safe counters of requests in flight and of progress. Progress never decreases."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_in_flight = 0
        self._progress = 0

    def begin(self) -> None:
        """Count the start of a request."""
        with self._lock:
            self._num_in_flight += 1
            self._progress += 1

    def end(self) -> None:
        """Count the end of a request, with a reply or an error."""
        with self._lock:
            self._num_in_flight -= 1
            self._progress += 1

    def progress(self) -> None:
        """Count progress of a handler."""
        with self._lock:
            self._progress += 1

    def read(self) -> Heartbeat:
        """Return the present counts as a message."""
        with self._lock:
            return Heartbeat(num_in_flight=self._num_in_flight, progress=self._progress)


class HeartbeatThread:
    """A context manager that sends heartbeats: `with HeartbeatThread(activity, endpoint=..., every_s=...):`."""

    def __init__(self, activity: ActivityCounter, *, endpoint: str, every_s: float) -> None:
        self._activity = activity
        self._endpoint = endpoint
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> HeartbeatThread:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.IDENTITY, HEARTBEAT_IDENTITY)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._endpoint)
            while not self._stopped.is_set():
                try:
                    socket.send_multipart(pack(self._activity.read()), flags=zmq.NOBLOCK)
                except zmq.Again:  # the daemon reads nothing and its queue is full: drop this heartbeat
                    self._stopped.wait(self._every_s)
                self._stopped.wait(self._every_s)


class LivenessVerdict(StrEnum):
    """The result of a tick."""

    ALIVE = "alive"
    SILENT = "silent"  # no heartbeat for too long
    STALLED = "stalled"  # heartbeats, requests in flight, but no progress for too long


@dataclass(slots=True)
class Liveness:
    """The failure detector of one worker process. With `max_stalled_ticks` None a request may take any time."""

    max_silent_ticks: int
    max_stalled_ticks: int | None = None
    num_silent_ticks: int = 0
    num_stalled_ticks: int = 0
    last_progress: int = -1
    is_busy: bool = False

    def beat(self, heartbeat: Heartbeat) -> None:
        """Record a heartbeat."""
        self.num_silent_ticks = 0
        self.is_busy = heartbeat.num_in_flight > 0
        if heartbeat.progress > self.last_progress:  # the start of a request is progress, too
            self.num_stalled_ticks = 0
        self.last_progress = heartbeat.progress

    def tick(self) -> LivenessVerdict:
        """Count one interval and return the verdict."""
        self.num_silent_ticks += 1
        self.num_stalled_ticks += 1
        if self.num_silent_ticks > self.max_silent_ticks:
            return LivenessVerdict.SILENT
        if self.max_stalled_ticks is not None and self.is_busy and self.num_stalled_ticks > self.max_stalled_ticks:
            return LivenessVerdict.STALLED
        return LivenessVerdict.ALIVE
