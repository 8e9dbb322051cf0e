"""The gate between a pause and the loops that compute."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ftis_node.node.pausing.policy import RUN, Decision
from ftis_node.telemetry.status import PauseStatus


class PauseGate:
    """A gate for new work, and a lock that a step or an evaluation holds. For one event loop.

    `decision` is the present one. `num_pauses` counts those after which the workers are new processes.
    """

    def __init__(self) -> None:
        self.decision = RUN
        self.num_pauses = 0
        self.is_in_effect = False  # the workers have ended
        self._since: float | None = None  # Unix time
        self._resumed_at: float | None = None  # Unix time
        self._stopped_at: float | None = None  # monotonic
        self._stopped_s = 0.0
        self._running = asyncio.Event()
        self._running.set()
        self._work = asyncio.Lock()

    @property
    def is_paused(self) -> bool:
        """Return whether a pause has begun. A step in progress still ends."""
        return not self._running.is_set()

    def clock(self) -> float:
        """Return the seconds of a monotonic clock that does not run while the workers have ended or load the model."""
        now = time.monotonic() if self._stopped_at is None else self._stopped_at
        return now - self._stopped_s

    async def wait_running(self) -> None:
        await self._running.wait()

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Delay the effect of a pause while the block runs. During a pause, wait for its end first."""
        async with self._work:
            yield

    async def begin(self, decision: Decision) -> None:
        """Admit no new work. Return when the work in progress has ended."""
        self.decision, self._since = decision, time.time()
        self._running.clear()
        await self._work.acquire()

    def take_effect(self) -> None:
        """Note that the workers have ended."""
        self.is_in_effect = True
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        self.num_pauses += 1

    def lose_effect(self) -> None:
        """Note that the pause ends and the workers start. `end` follows when they are ready."""
        self.decision, self.is_in_effect = RUN, False

    def end(self) -> float:
        """Admit work again. Return the length of the pause in seconds."""
        assert self._since is not None, "a pause has begun"
        self._resumed_at = time.time()
        length_s = self._resumed_at - self._since
        self.decision, self._since, self.is_in_effect = RUN, None, False
        if self._stopped_at is not None:
            self._stopped_s += time.monotonic() - self._stopped_at
            self._stopped_at = None
        self._work.release()
        self._running.set()
        return length_s

    def status(self) -> PauseStatus:
        return PauseStatus(self.decision.reason, self.decision.until, self.is_in_effect, self._resumed_at)
