"""The failure detector of a worker, a pure state machine without clock or socket: heartbeats and ticks in, a verdict
out.

Silence is counted in ticks of the daemon's event loop, not by a clock. If the daemon itself was paused for a minute (a
suspended laptop, a debugger), it counts one tick without a heartbeat, not a dead worker.

The heartbeat of a worker. A separate thread sends it, so long tensor operations in the event loop do not delay it.

A heartbeat alone proves that the process lives, not that it makes progress. So each one has two counters: requests in
flight, and progress that handlers report. Requests in flight without progress for too long count as a hang, which
`liveness.py` detects in the daemon.

The restart policy of a worker: exponential back-off, as a pure function of its time in service.

A worker that served for a while and then died is restarted almost at once. After each death soon after its start the
delay doubles. After a few such deaths in a row no restart follows: another start does not remove the cause, which the
worker's log shows. A worker that lacks memory has more attempts, because another process may free memory.

Parent-death handling: a worker ends when its owner does, even if the owner is killed.

Two mechanisms run at once. The kernel's parent-death signal (Linux) is instant, but applies only to the direct parent.
A thread that watches the owner also works if a launcher such as torchrun is between the two. The thread ends the
process without clean-up: a worker writes its files atomically (`durable.py`), so a kill cannot corrupt them.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import zmq

from ftis_node.backoff import ExponentialBackoff
from ftis_node.workers.wire import HEARTBEAT_IDENTITY, Heartbeat, pack

if TYPE_CHECKING:
    from types import TracebackType

PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
ORPHAN_EXIT_CODE = 1
POLL_EVERY_S = 0.5


def die_with_owner(owner_pid: int, *, poll_every_s: float = POLL_EVERY_S) -> None:
    """End this process when `owner_pid` ends. Call it once, before any long work."""
    parent_pid = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent_pid:  # the owner died before the signal was requested
        os._exit(ORPHAN_EXIT_CODE)
    watch = threading.Thread(target=_watch, args=(owner_pid, poll_every_s), name="owner-watch", daemon=True)
    watch.start()


def _watch(owner_pid: int, poll_every_s: float) -> None:
    if hasattr(os, "pidfd_open"):
        _wait_for_exit(owner_pid)
    else:
        _poll_parent(os.getppid(), poll_every_s)
    os._exit(ORPHAN_EXIT_CODE)


def _wait_for_exit(owner_pid: int) -> None:
    """Block until the owner has ended. A pidfd becomes readable at the exit, before the process is reaped."""
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    poll.poll()


def _poll_parent(parent_pid: int, poll_every_s: float) -> None:
    """Block until the parent of this process changes, on systems without pidfds."""
    while os.getppid() == parent_pid:
        time.sleep(poll_every_s)


@dataclass(frozen=True, slots=True)
class Restart:
    """A decision: restart after `delay_s`. `num_quick_deaths` is the count of quick deaths (or shortages) for the next
    decision.
    """

    delay_s: float
    num_quick_deaths: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A decision: do not restart."""

    num_quick_deaths: int


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The back-off between restarts, and the limits of quick deaths and of memory shortages in a row."""

    backoff: ExponentialBackoff = ExponentialBackoff(first_s=0.5, ceiling_s=60.0)
    quick_death_s: float = 30.0
    max_quick_deaths: int = 5
    max_shortages: int = 20

    def after_death(self, *, served_s: float, num_quick_deaths: int) -> Restart | GiveUp:
        """Return the decision after a death.

        `served_s` is the time from readiness to death, 0 if the worker never was ready. `num_quick_deaths` counts the
        quick deaths in a row before this one.
        """
        if served_s >= self.quick_death_s:
            return Restart(delay_s=self.backoff.delay_s(1), num_quick_deaths=0)
        return self._after(num_quick_deaths + 1, at_most=self.max_quick_deaths)

    def after_shortage(self, *, num_shortages: int) -> Restart | GiveUp:
        """Return the decision after a lack of memory; `num_shortages` counts those in a row before this one."""
        return self._after(num_shortages + 1, at_most=self.max_shortages)

    def _after(self, number: int, *, at_most: int) -> Restart | GiveUp:
        if number >= at_most:
            return GiveUp(num_quick_deaths=number)
        return Restart(delay_s=self.backoff.delay_s(number), num_quick_deaths=number)


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
    """The failure detector of one worker process. With `max_stalled_ticks` None a request may take any time.

    `longest_ticks` is the longest time from one progress of a request to the next, without those still in progress.
    """

    max_silent_ticks: int
    max_stalled_ticks: int | None = None
    num_silent_ticks: int = 0
    num_stalled_ticks: int = 0
    last_progress: int = -1
    longest_ticks: int = 0
    is_busy: bool = False

    def beat(self, heartbeat: Heartbeat) -> None:
        """Record a heartbeat."""
        self.num_silent_ticks = 0
        if heartbeat.progress > self.last_progress:  # the start of a request is progress, too
            if self.is_busy:  # at the heartbeat before: time without a request does not count
                self.longest_ticks = max(self.longest_ticks, self.num_stalled_ticks)
            self.num_stalled_ticks = 0
        self.is_busy = heartbeat.num_in_flight > 0
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
