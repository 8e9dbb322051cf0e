"""The time of an event loop, moved by hand: limits and sleeps end by it alone, however busy the machine is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

TURNS = 20  # of the loop: what has waited for the time goes on


class LoopClock:
    """The clock of the running loop, until the end of the test."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._now = loop.time()
        patch.setattr(loop, "time", lambda: self._now)

    async def passes(self, seconds: float) -> None:
        """So much later; what was begun before begins to wait first."""
        await self._turn()
        self._now += seconds
        await self._turn()

    async def _turn(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
