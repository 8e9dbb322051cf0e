"""An event loop whose time is made: it passes when every task waits. Hours of a node's loops take seconds."""

from __future__ import annotations

import asyncio
import selectors
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator


class Clock:
    """A steady clock and a calendar, which can be moved apart."""

    def __init__(self, *, unix_s: float) -> None:
        self.steady_s = 1000.0
        self.moved_s = unix_s - self.steady_s  # of the calendar against the steady clock

    def monotonic(self) -> float:
        return self.steady_s

    def time(self) -> float:
        return self.steady_s + self.moved_s

    @contextmanager
    def rules(self) -> Iterator[None]:
        """`time.time` and `time.monotonic` are this clock's."""
        with patch("time.time", self.time), patch("time.monotonic", self.monotonic):
            yield


class _Selector(selectors.SelectSelector):
    """Where nothing is ready, the time of the next timer comes at once."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("every task waits, and none for a time")
        if not ready and timeout and timeout > 0:
            self._clock.steady_s += timeout + 1e-6  # past the timer, whatever was rounded
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Threads must not be waited for: while they work, time would pass."""

    def __init__(self, clock: Clock) -> None:
        self._made = clock
        super().__init__(_Selector(clock))

    def time(self) -> float:
        return self._made.steady_s

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, under the clock."""
        with self._made.rules():
            return self.run_until_complete(work)
