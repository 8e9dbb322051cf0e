"""Is a worker still alive? A pure judge: beats and ticks in, a verdict out; no clock and no socket inside.

Silence is counted in ticks of the daemon's own loop, not read off a clock: when the daemon itself was stopped for a
minute (a suspended laptop, a debugger) it sees one tick without a beat, not a dead worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftis_node.workers.wire import Heartbeat


class LivenessVerdict(StrEnum):
    """What a tick may find."""

    ALIVE = "alive"
    SILENT = "silent"  # no heartbeat for too long
    STALLED = "stalled"  # heartbeats, requests in flight, but no progress for too long


@dataclass(slots=True)
class Liveness:
    """Judges one life of a worker. `max_stalled_ticks` None: a worker may take as long as it likes."""

    max_silent_ticks: int
    max_stalled_ticks: int | None = None
    num_silent_ticks: int = 0
    num_stalled_ticks: int = 0
    last_progress: int = -1
    is_busy: bool = False

    def beat(self, heartbeat: Heartbeat) -> None:
        """A heartbeat came."""
        self.num_silent_ticks = 0
        self.is_busy = heartbeat.num_in_flight > 0
        if heartbeat.progress > self.last_progress:  # a request that begins is progress, too
            self.num_stalled_ticks = 0
        self.last_progress = heartbeat.progress

    def tick(self) -> LivenessVerdict:
        """One interval went by."""
        self.num_silent_ticks += 1
        self.num_stalled_ticks += 1
        if self.num_silent_ticks > self.max_silent_ticks:
            return LivenessVerdict.SILENT
        if self.max_stalled_ticks is not None and self.is_busy and self.num_stalled_ticks > self.max_stalled_ticks:
            return LivenessVerdict.STALLED
        return LivenessVerdict.ALIVE
