"""An event loop with simulated time, which passes when each task waits. Hours of a node's loops take seconds."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any
from unittest.mock import patch


class Clock:
    """A monotonic clock, and a Unix clock that can be set."""

    def __init__(self, *, unix_s: float) -> None:
        self.steady_s = 1000.0
        self.moved_s = unix_s - self.steady_s  # difference of both clocks

    def time(self) -> float:
        return self.steady_s + self.moved_s


class _Selector(selectors.SelectSelector):
    """A selector that sets the clock to the next timer if no file is ready."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("each task waits, and none for a time")
        if not ready and timeout and timeout > 0:
            self._clock.steady_s += timeout + 1e-6  # past the timer, despite rounding
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a simulated clock. Tasks must not wait for threads, because time would pass meanwhile."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        super().__init__(_Selector(clock))

    def time(self) -> float:
        return self._clock.steady_s

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run `work` under the clock, also for `time.time` and `time.monotonic`, and return its result."""
        with patch("time.time", self._clock.time), patch("time.monotonic", self.time):
            return self.run_until_complete(work)
