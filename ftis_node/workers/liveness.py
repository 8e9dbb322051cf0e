"""The failure detector of a worker, a pure state machine without clock or socket: heartbeats and ticks in, a verdict
out.

Silence is counted in ticks of the daemon's event loop, not by a clock. If the daemon itself was paused for a minute (a
suspended laptop, a debugger), it counts one tick without a heartbeat, not a dead worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftis_node.workers.wire import Heartbeat


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
