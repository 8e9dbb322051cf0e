"""The heartbeat of a worker. A separate thread sends it, so long tensor operations in the event loop do not delay it.

A heartbeat alone proves that the process lives, not that it makes progress. So each one has two counters: requests in
flight, and progress that handlers report. Requests in flight without progress for too long count as a hang, which
`liveness.py` detects in the daemon.
"""

from __future__ import annotations

import threading
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
