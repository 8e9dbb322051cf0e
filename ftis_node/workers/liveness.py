"""Heartbeats of a worker, the daemon's failure detector, the restart policy, and a worker's end.

A heartbeat alone proves that the process lives, not that it makes progress. So each one has two counters: requests in
flight, and progress that handlers report. Requests in flight without progress for too long count as a hang.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import zmq

from ftis_node.backoff import ExponentialBackoff
from ftis_node.workers.wire import HEARTBEAT_IDENTITY, Heartbeat, pack

PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
ORPHAN_EXIT_CODE = 1
SILENT, STALLED = "sent no heartbeat", "made no progress"


def die_with_owner(owner_pid: int) -> None:
    """End this process when `owner_pid` ends, even if it is killed. Call it once, before any long work.

    The kernel's parent-death signal is instant, but applies only to the direct parent. A thread that watches the owner
    also works if a launcher such as torchrun is between the two.
    """
    die_with_parent()
    threading.Thread(target=_end_after, args=(owner_pid,), name="owner-watch", daemon=True).start()


def die_with_parent() -> None:
    """End this process when the thread that started it ends. Starts no thread, and does not hold after a fork."""
    parent_pid = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent_pid:  # the parent died before the signal was requested
        os._exit(ORPHAN_EXIT_CODE)


def _end_after(owner_pid: int) -> None:
    """Wait for the owner's end. A pidfd becomes readable at the exit, before the process is reaped."""
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        os._exit(ORPHAN_EXIT_CODE)
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    poll.poll()
    os._exit(ORPHAN_EXIT_CODE)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The back-off between restarts, and the limits of quick deaths and of memory shortages in a row.

    A worker that lacks memory has more attempts, because another process may free memory.
    """

    backoff: ExponentialBackoff = ExponentialBackoff(first_s=0.5, ceiling_s=60.0)
    quick_death_s: float = 30.0
    max_quick_deaths: int = 5
    max_shortages: int = 20


@dataclass(slots=True)
class RestartCounter:
    """The failures of one worker in a row. `num_deaths` counts those like the last one."""

    policy: RestartPolicy
    num_quick_deaths: int = 0
    num_shortages: int = 0
    num_deaths: int = 0

    def note_service(self, served_s: float) -> None:
        """Forget the failures before a service that was no quick death, also if a pause ended it."""
        if served_s >= self.policy.quick_death_s:
            self.num_quick_deaths = self.num_shortages = 0

    def next_delay_s(self, *, served_s: float, is_short: bool = False) -> float | None:
        """Count a death and return the time until the restart; None if no restart follows.

        `served_s` is the time from readiness to death, 0 if the worker never was ready; `is_short`: it lacked memory.
        """
        if is_short:
            self.num_deaths = self.num_shortages = self.num_shortages + 1
            is_last = self.num_shortages >= self.policy.max_shortages
        else:
            is_quick = served_s < self.policy.quick_death_s
            self.num_shortages = 0
            self.num_deaths = self.num_quick_deaths = self.num_quick_deaths + 1 if is_quick else 0
            is_last = self.num_quick_deaths >= self.policy.max_quick_deaths
        return None if is_last else self.policy.backoff.delay_s(max(1, self.num_deaths))


class ActivityCounter:
    """Thread-safe counters of requests in flight and of progress. Progress never decreases."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_in_flight = 0
        self._progress = 0

    def progress(self, change: int = 0) -> None:
        """Count progress. `change` is 1 at the beginning of a request, -1 at its end."""
        with self._lock:
            self._num_in_flight += change
            self._progress += 1

    def read(self) -> Heartbeat:
        with self._lock:
            return Heartbeat(num_in_flight=self._num_in_flight, progress=self._progress)


@contextmanager
def heartbeats(activity: ActivityCounter, *, endpoint: str, every_s: float) -> Iterator[None]:
    """Send heartbeats from a thread, so that long tensor operations in the event loop do not delay them."""
    stopped = threading.Event()

    def beat() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.IDENTITY, HEARTBEAT_IDENTITY)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(endpoint)
            while not stopped.is_set():
                try:
                    socket.send_multipart(pack(activity.read()), flags=zmq.NOBLOCK)
                except zmq.Again:  # the daemon reads nothing and its queue is full: drop this heartbeat
                    stopped.wait(every_s)
                stopped.wait(every_s)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@dataclass(slots=True)
class Liveness:
    """The failure detector of one worker process. With `max_stalled_ticks` None a request may take any time.

    Silence is counted in ticks of the daemon's event loop, not by a clock. If the daemon itself was paused for a minute
    (a suspended laptop, a debugger), it counts one tick without a heartbeat, not a dead worker.

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
        self.num_silent_ticks = 0
        if heartbeat.progress > self.last_progress:  # the start of a request is progress, too
            if self.is_busy:  # at the heartbeat before: time without a request does not count
                self.longest_ticks = max(self.longest_ticks, self.num_stalled_ticks)
            self.num_stalled_ticks = 0
        self.is_busy = heartbeat.num_in_flight > 0
        self.last_progress = heartbeat.progress

    def tick(self) -> str:
        """Count one interval. Returns what is wrong, in words that follow "the worker"; "" if nothing is."""
        self.num_silent_ticks += 1
        self.num_stalled_ticks += 1
        if self.num_silent_ticks > self.max_silent_ticks:
            return SILENT
        is_stalled = self.max_stalled_ticks is not None and self.num_stalled_ticks > self.max_stalled_ticks
        return STALLED if self.is_busy and is_stalled else ""


@dataclass(frozen=True, slots=True)
class Timing:
    """Time limits in seconds. With `stall_timeout_s` None a request may take any time.

    After `Stop` a worker has `stop_grace_s` to end, or `stop_grace_factor` times its longest time without progress if
    that is more. Each progress that it reports begins this time again, up to `save_limit_s` in all.
    """

    start_grace_s: float = 900.0
    heartbeat_every_s: float = 1.0
    heartbeat_timeout_s: float = 30.0
    stall_timeout_s: float | None = None
    stop_grace_s: float = 4.0
    stop_grace_factor: float = 2.0
    save_limit_s: float = 0.0
    terminate_grace_s: float = 1.0

    def liveness(self) -> Liveness:
        def ticks(timeout_s: float) -> int:
            return max(1, round(timeout_s / self.heartbeat_every_s))

        stalled = None if self.stall_timeout_s is None else ticks(self.stall_timeout_s)
        return Liveness(ticks(self.heartbeat_timeout_s), stalled)


def describe_exit(return_code: int) -> str:
    """Return how a process ended, as words that follow its name."""
    if return_code == -signal.SIGKILL:
        return "was killed by SIGKILL (out of memory, or manually)"
    if return_code < 0:
        return f"was ended by {signal.Signals(-return_code).name}"
    return f"exited with code {return_code}"
