"""A manual clock of an event loop: timeouts and sleeps depend on it alone, not on the load of the machine."""

import asyncio

import pytest

ITERATIONS = 20  # of the loop: enough for the tasks whose time has come to run


class LoopClock:
    """The manual clock of the running loop, until the test ends."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._now = loop.time()
        patch.setattr(loop, "time", lambda: self._now)

    async def advance(self, seconds: float) -> None:
        """Advance the time. Tasks that are ready run before and after, so that a new task begins its wait first."""
        await self._run_ready_tasks()
        self._now += seconds
        await self._run_ready_tasks()

    async def _run_ready_tasks(self) -> None:
        for _ in range(ITERATIONS):
            await asyncio.sleep(0)
